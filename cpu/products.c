// y = x Wᵀ on a CPU, for any number of rows of x. Compiled after blocks.c (few rows, few panels, a
// stretch of columns) and integers.c.

enum { NEAR = 192 };                               // rows of one pass over the panels: x stays near

// The stretch of W that begins at panel p and column k, n columns: what does not depend on x.
static Stretch stretch_at(const Weight *w, long p, long k, long n) {
    long columns = COLUMNS[w->kind], unit = WIDE * BYTES[w->kind], units = parts(w->K, columns);
    long groups = parts(w->K, w->group), g = (p * groups + k / w->group) * WIDE;
    return (Stretch){ .w = (const char *)w->w + (p * units + k / columns) * unit,
                      .panel = units * unit, .units = parts(n, columns),
                      .scale = w->scale ? w->scale + g * (w->exact ? 4 : 2) : 0,
                      .zero = w->zero ? w->zero + g : 0, .next = groups * WIDE, .exact = w->exact };
}

// Panels from first to last, times all rows of x: [T, row] -> y: [T, N], N whole panels.
static void some_panels(const Weight *w, const char *x, long row, const Digits *digits, float *y,
                        long T, long N, long first, long last) {
    long kind = w->kind, unit = WIDE * BYTES[kind], stretch = least(w->group, STRETCH);
    long told = parts(w->K, stretch);
    long size = digits ? 1 : sizeof(float), tiles = parts(T, TILE), most = parts(T, tiles);
    long many = !digits && T > FEW[kind], wide = digits ? PANELS_digits(most) : PANELS(most);
    float *room = many ? aligned_alloc(64, PANELS(1) * STRETCH * WIDE * sizeof *room) : 0;
    for (long p = first, P; p < last; p += P) {
        P = last - p < wide ? 1 : wide;
        for (long k = 0; k < w->K; k += stretch) {
            Stretch a = stretch_at(w, p, k, least(w->K - k, stretch));
            a.x = x + k * size, a.row = row, a.digits = digits + k / stretch, a.groups = told;
            a.y = y + p * WIDE, a.N = N, a.first = k == 0, a.far = a.panel;
            if (digits) a.x = x + DIGITS * T * k, a.row = DIGITS * a.units * COLUMNS_i4;
            // Of the next stretch, to fetch:
            long bytes = T > 1 || LANES == 8 || kind > BF16 ? a.units * unit : 0;
            const char *next = a.w + bytes;
            if (many) a = unfold[kind](&a, P, room);
            for (long i = 0, rows; i < tiles; i++, a.y += rows * N, a.digits += rows * told) {
                rows = T / tiles + (i < T % tiles);                     // nearly as many each time
                a.pace = bytes / a.units / tiles, a.soon = next + i * a.units * a.pace;
                (digits ? blocks_digits : blocks[many ? F32 : kind])[rows][P > 1](&a);
                a.x = (const char *)a.x + rows * a.row * size;
            }
        }
    }
    free(room);
}

// bfloat16: the scale of a vector whose largest number becomes `top`, 127 in INT8, 448 in FP8
// (quant.int8, round_fp8).
INLINE uint16_t row_scale(const float *x, long n, float top) {
    float most = 0;
    #pragma omp simd reduction(max:most)
    for (long i = 0; i < n; i++) most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
    float most_scale = top > 127 ? 7.58e35f : 2.679e36f;
    union { float f; uint32_t i; } u = { most / top };
    u.f = u.f < 1e-30f ? 1e-30f : u.f > most_scale ? most_scale : u.f;
    return (u.i + 0xFFFF) >> 16;
}

// The nearest number of E4M3, ties to even: 3 bits behind the leading one, and no step below 2^-9.
INLINE float to_e4m3(float x) {
    union { float f; uint32_t i; } u = { fabsf(x) < 0x1p-6f ? 0x1p-6f : x }, step;
    step.i = (u.i >> 23 & 255) - 3 << 23;
    return rintf(x / step.f) * step.f;
}

// A row of x as the panels want it: in the order of the columns, in whole units; rounded as W is,
// if inputs have 8 bits.
static void arrange(const Weight *w, const float *x, float *to, long row) {
    for (long k = 0; k < w->K; k++) to[k] = x[w->order ? w->order[k] : k];
    for (long k = w->K; k < row; k++) to[k] = 0;
    if (w->inputs == 8) {
        int whole = w->kind == I8;
        float scale = one_bf16(row_scale(to, w->K, whole ? 127 : 448));
        for (long k = 0; k < w->K; k++)
            to[k] = (whole ? rintf(to[k] / scale) : to_e4m3(to[k] / scale)) * scale;
    }
}

// y = x Wᵀ + bias. x: float32[T, K]; y: float32[T, N].
void product(const float *x, const Weight *w, float *y, long T) {
    long N = w->N, K = w->K, panels = parts(N, WIDE), columns = COLUMNS[w->kind];
    long row = parts(K, columns) * columns, stretch = least(w->group, STRETCH);
    long told = parts(K, stretch), moves = row != K || w->order || w->inputs == 8;
    Digits *digits = w->kind == I4 && T <= FEW_digits ? malloc(T * told * sizeof *digits) : 0;
    float *full = N % WIDE ? aligned_alloc(64, T * panels * WIDE * sizeof *full) : y;
    float *arranged = moves ? malloc(T * row * sizeof *x) : 0;
    int8_t *integers = digits ? malloc(DIGITS * T * row) : 0;
    #pragma omp parallel for if ((moves || digits) && T * K > 1 << 13)
    for (long t = 0; t < (moves || digits ? T : 0); t++) {
        if (moves) arrange(w, x + t * K, arranged + t * row, row);
        if (digits) to_digits(moves ? arranged : x, row, stretch, integers, T, t,
            digits + t * told);
    }
    if (moves) x = arranged;
    #pragma omp parallel if (N * K > 1 << 16)
    {
        long threads = omp_get_num_threads(), me = omp_get_thread_num();
        for (long t = 0, i = 0, rows, n = parts(T, NEAR); i < n; i++, t += rows) {
            rows = T / n + (i < T % n);                                 // nearly as many each time
            const void *from = digits ? (const void *)integers : x + t * row;
            some_panels(w, from, row, digits, full + t * panels * WIDE, rows, panels * WIDE,
                        panels * me / threads, panels * (me + 1) / threads);
        }
    }
    for (long t = 0; full != y && t < T; t++)
        memcpy(y + t * N, full + t * panels * WIDE, N * sizeof *y);
    for (long t = 0; w->bias && t < T; t++) for (long n = 0; n < N; n++) y[t * N + n] += w->bias[n];
    if (full != y) free(full);
    free(arranged), free(integers), free(digits);
}

// Some rows of W as numbers: [R, K] -> 0; where there is no such row, its place in `which`, and 1.
long rows(const Weight *w, const int64_t *which, float *out, long R) {
    float room[STRETCH * WIDE] __attribute__((aligned(64)));
    long K = w->K, stretch = least(w->group, STRETCH);
    for (long r = 0; r < R; r++, out += K) {
        if (which[r] < 0 || which[r] >= w->N) return r + 1;
        for (long k = 0, lane = which[r] % WIDE, n; k < K; k += stretch) {
            Stretch a = stretch_at(w, which[r] / WIDE, k, n = least(K - k, stretch));
            float by = scales(&a, lane / LANES * LANES)[lane % LANES];
            unfold[w->kind](&a, 1, room);
            for (long i = 0; i < n; i++)
                out[w->order ? w->order[k + i] : k + i] = room[i * WIDE + lane] * by;
        }
    }
    return 0;
}
