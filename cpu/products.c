// y = x Wᵀ on a CPU, for any number of rows of x, with W in float32, bfloat16, INT8 or INT4. Compiled after blocks.c
// (few rows, few panels, a stretch of columns) and integers.c.

enum { NEAR = 192 };                                // rows that one pass over the panels multiplies: x stays near
static const int FEW[] = { 0, LANES == 16 ? 32 : 8, 32, FEW_i4 };       // rows that do not pay for `unfold`

// Panels from first to last, times all rows of x: [T, row] -> y: [T, N], N whole panels.
static void some_panels(const Weight *w, const char *x, long row, const Digits *digits, float *y, long T, long N,
                        long first, long last) {
    static void (*const (*const blocks[])[2])(const Stretch *) = { blocks_f32, blocks_bf16, blocks_i8, blocks_i4 };
    static Stretch (*const unfold[])(const Stretch *, long, float *) = { 0, unfold_bf16, unfold_i8, unfold_i4 };
    long kind = w->kind, columns = COLUMNS[kind], unit = WIDE * BYTES[kind], units = parts(w->K, columns);
    long stretch = least(w->group, STRETCH), groups = parts(w->K, w->group);
    long size = digits ? 1 : sizeof(float), tiles = parts(T, TILE), most = parts(T, tiles);
    long many = kind != F32 && T > FEW[kind], wide = digits ? PANELS_i4(most) : PANELS(most);
    float *room = many ? aligned_alloc(64, PANELS(1) * STRETCH * WIDE * sizeof *room) : 0;
    for (long p = first, P; p < last; p += P) {
        P = last - p < wide ? 1 : wide;
        for (long k = 0; k < w->K; k += stretch) {
            long g = (p * groups + k / w->group) * WIDE, n = least(w->K - k, stretch);
            Stretch a = { (const char *)w->w + (p * units + k / columns) * unit, units * unit, parts(n, columns),
                          w->scale ? w->scale + g : 0, w->zero ? w->zero + g : 0, groups * WIDE,
                          x + k * size, row, digits + k / w->group, groups, y + p * WIDE, N, k == 0,
                          0, units * unit, 0 };
            if (digits) a.x = x + DIGITS * T * k, a.row = DIGITS * a.units * COLUMNS_i4;
            long bytes = tiles > 1 || LANES == 8 || kind > BF16 ? a.units * unit : 0;   // of the next stretch, to fetch
            const char *next = a.w + bytes;
            if (many) a = unfold[kind](&a, P, room);
            for (long i = 0, rows; i < tiles; i++, a.y += rows * N, a.digits += rows * groups) {
                rows = T / tiles + (i < T % tiles);                     // nearly as many each time
                a.pace = bytes / a.units / tiles, a.soon = next + i * a.units * a.pace;
                blocks[many ? F32 : kind][rows][P > 1](&a);
                a.x = (const char *)a.x + rows * a.row * size;
            }
        }
    }
    free(room);
}

// y = x Wᵀ + bias. x: float32[T, K]; y: float32[T, N].
void product(const float *x, const Weight *w, float *y, long T) {
    long N = w->N, K = w->K, panels = parts(N, WIDE), row = parts(K, COLUMNS[w->kind]) * COLUMNS[w->kind];
    long groups = parts(K, w->group);
    Digits *digits = w->kind == I4 && T <= FEW[I4] ? malloc(T * groups * sizeof *digits) : 0;
    float *full = N % WIDE ? aligned_alloc(64, T * panels * WIDE * sizeof *full) : y;
    char *arranged = digits ? malloc(DIGITS * T * row) : row != K ? calloc(T * row, sizeof *x) : 0;     // whole units
    #pragma omp parallel for if (arranged && T * K > 1 << 13)
    for (long t = 0; t < (arranged ? T : 0); t++) {
        if (digits) to_digits(x, K, w->group, (int8_t *)arranged, T, t, digits + t * groups);
        else memcpy((float *)arranged + t * row, x + t * K, K * sizeof *x);
    }
    #pragma omp parallel if (N * K > 1 << 16)
    {
        long threads = omp_get_num_threads(), me = omp_get_thread_num();
        for (long t = 0, i = 0, rows, n = parts(T, NEAR); i < n; i++, t += rows) {
            rows = T / n + (i < T % n);                                 // nearly as many each time
            some_panels(w, arranged ? arranged + t * row * sizeof *x : (const char *)(x + t * row), row, digits,
                        full + t * panels * WIDE, rows, panels * WIDE, panels * me / threads,
                        panels * (me + 1) / threads);
        }
    }
    for (long t = 0; full != y && t < T; t++) memcpy(y + t * N, full + t * panels * WIDE, N * sizeof *y);
    for (long t = 0; w->bias && t < T; t++) for (long n = 0; n < N; n++) y[t * N + n] += w->bias[n];
    if (full != y) free(full);
    free(arranged), free(digits);
}

INLINE float number_at(const Weight *w, long at, long g, int c) {           // column c of a unit of a group
    switch (w->kind) {
        case F32: return ((const float *)w->w)[at];
        case BF16: return one_bf16(((const uint16_t *)w->w)[2 * at + c]);
        case I8: return ((const int8_t *)w->w)[at];
        default: return (((const uint8_t *)w->w)[4 * at + c % 4] >> c / 4 * 4 & 15) - w->zero[g];
    }
}

// Some rows of W as numbers: [R, K] -> 0; where there is no such row, its place in `which`, and 1.
long rows(const Weight *w, const int64_t *which, float *out, long R) {
    long K = w->K, columns = COLUMNS[w->kind], units = parts(K, columns), groups = parts(K, w->group);
    for (long r = 0; r < R; r++) {
        if (which[r] < 0 || which[r] >= w->N) return r + 1;
        long panel = which[r] / WIDE, lane = which[r] % WIDE;
        for (long k = 0; k < K; k++) {
            long g = (panel * groups + k / w->group) * WIDE + lane;
            float x = number_at(w, (panel * units + k / columns) * WIDE + lane, g, k % columns);
            out[r * K + k] = w->scale ? x * one_bf16(w->scale[g]) : x;
        }
    }
    return 0;
}
