// y = x Wᵀ on a CPU, for any number of rows of x. Compiled after blocks.c (few rows, few panels, a
// stretch of columns).

float nf4[16];                                      // native.py puts quant.nf4 here
const long int8_columns = COLUMNS_whole;            // of a unit of INT8, for native.py

// The widest vectors that this was compiled for, and whether this CPU has them: LLAMA_MARCH may
// name another CPU.
#if defined __AVX512VNNI__
const char instructions[] = "avx512-vnni";
long runs_here() { return __builtin_cpu_supports("avx512vnni") != 0; }
#elif defined __AVX512F__
const char instructions[] = "avx512";
long runs_here() { return __builtin_cpu_supports("avx512bw") != 0; }
#elif defined __AVXVNNI__
const char instructions[] = "avx-vnni";
long runs_here() { return __builtin_cpu_supports("avxvnni") != 0; }
#elif defined __AVX2__
const char instructions[] = "avx2";
long runs_here() { return __builtin_cpu_supports("avx2") != 0; }
#else
#if defined __ARM_FEATURE_DOTPROD
const char instructions[] = "neon-dotprod";
#elif defined __aarch64__
const char instructions[] = "neon";
#else
const char instructions[] = "no vectors that it knows";
#endif
long runs_here() { return 1; }
#endif

// NEAR, NEAR_TILES: rows of one pass over the panels: x stays near. AHEAD: stretches from what is
// fetched to what is read.
enum { NEAR = 192, NEAR_TILES = 256, AHEAD = 4 };

// To panel p's scales and zeros of the group that column k is in.
static void see_group(Stretch *a, const Weight *w, long p, long k) {
    long at = p * a->next + k / w->group * WIDE;
    if (w->scale) a->scale = w->scale + at * (w->scale_type == SCALE_F32 ? 4 : 2);
    if (w->zero) a->zero = (const char *)w->zero + at * (w->float_zeros ? 4 : 2);
}

// The stretch of W that begins at panel p and column k, n columns: what does not depend on x.
static Stretch stretch_at(const Weight *w, long p, long k, long n) {
    long columns = COLUMNS[w->kind], unit = WIDE * BYTES[w->kind], units = parts(w->K, columns);
    Stretch a = { .w = (const char *)w->w + (p * units + k / columns) * unit,
                  .panel = units * unit, .units = parts(n, columns), .runs = 1,
                  .next = parts(w->K, w->group) * WIDE, .scale_type = w->scale_type,
                  .float_zeros = w->float_zeros, .common_zero = w->common_zero };
    see_group(&a, w, p, k);
    return a;
}

// x as the panels want it: K columns, of 4 or (whole) 2 bytes; `row` bytes from row to row. Or as
// tiles.c wants it, in tiles of tile_rows rows (otherwise 0): `tile` bytes from a tile to the next,
// and `next` from stretch to stretch.
typedef struct {
    const char *x;
    const Whole *whole;
    long K, row, bytes, stretches, tile_rows, tile, next;
} Rows;

// Panels from first to last, times T rows of x -> y: [T, N], N whole panels. Divisions
// are slow, so most stand before the inner loops.
static void some_panels(const Weight *w, Rows x, float *y, long T, long N, long first, long last) {
    long kind = w->kind, unit = WIDE * BYTES[kind], stretch = least(w->group, STRETCH);
    long tiles = parts(T, WHOLE[kind] ? TILE_WHOLE : TILE), many = T > FEW[kind];
    long rows = T / tiles, one_more = T % tiles;                        // nearly as many each time
    long wide = PANELS(parts(T, tiles)), step = WHOLE[kind] ? COLUMNS_whole : 1;
    long runs = many || COLUMNS[kind] < LONG_UNIT ? 1 : STRETCH / stretch;
    long bytes = runs * parts(stretch, COLUMNS[kind]) * unit;           // of a call, in a panel
    long end = parts(x.K, runs * stretch) * bytes;
    float *room = many ? allocate(PANELS(1) * STRETCH * WIDE * sizeof *room) : 0;
    for (long p = first, P; p < last; p += P) {
        P = last - p < wide ? 1 : wide;
        Stretch a = stretch_at(w, p, 0, stretch), unfolded, *now = many ? &unfolded : &a;
        a.runs = runs, a.row = x.row / x.bytes / step, a.stretches = x.stretches, a.N = N;
        a.far = a.panel, a.pace = parts(unit, tiles * (many ? COLUMNS[kind] / step : 1));
        for (long k = 0, i = 0, columns = runs * stretch; k < x.K; k += columns, i += a.runs) {
            // To fetch: what is read later, of these panels or, beyond their end, of the next ones.
            a.soon = a.w + AHEAD * bytes + (k + AHEAD * columns < x.K ? 0 : P * a.panel - end);
            if (k + columns > x.K) {                                    // the last is a short one
                a.runs = (x.K - k) / stretch;
                if (a.runs < 1) a.runs = 1, a.units = parts(x.K - k, COLUMNS[kind]);
                columns = a.runs * stretch;
            }
            see_group(&a, w, p, k);
            a.x = x.x + k * x.bytes, a.whole = x.whole + i, a.y = y + p * WIDE, a.first = k == 0;
            if (many) unfolded = unfold[kind](&a, P, room);
            for (long t = 0, some; t < T; t += some) {
                some = rows + (t < one_more * (rows + 1));
                blocks[many ? WHOLE[kind] ? I16 : F32 : kind][some][P > 1](now);
                now->x += some * x.row, now->y += some * N, now->whole += some * x.stretches;
                now->soon += now->runs * now->units * now->pace;
            }
            a.w += a.runs * a.units * unit;
        }
    }
    free(room);
}

// bfloat16: the scale of a vector whose largest number becomes `top`, 127 in INT8, 448 in FP8
// (quant.FORMATS). NaN, if a number is not finite.
INLINE uint16_t row_scale(const float *x, long n, float top) {
    float most = 0, bad = 0;
    #pragma omp simd reduction(max:most) reduction(+:bad)
    for (long i = 0; i < n; i++) {
        most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
        bad += 0 * x[i];
    }
    if (bad != bad) return 0x7FC0;
    float most_scale = 0x1.FEp127f / top;  // quant.LARGEST
    union { float f; uint32_t i; } u = { most / top };
    u.f = u.f < 1e-30f ? 1e-30f : u.f > most_scale ? most_scale : u.f;
    return (u.i + 0xFFFF) >> 16;
}

// The nearest number of E4M3, ties to even: 3 bits behind the leading one, and no step below 2^-9.
INLINE float to_e4m3(float x) {
    union { float f; uint32_t i; } u = { fabsf(x) < 0x1p-6f ? 0x1p-6f : x }, step;
    step.i = ((u.i >> 23 & 255) - 3) << 23;
    return rintf(x / step.f) * step.f;
}

// A row of x, [K], in the order of W's columns; rounded as W is, if inputs have 8 bits.
static void arrange(const Weight *w, const float *x, float *to) {
    for (long k = 0; k < w->K; k++) to[k] = x[w->order ? w->order[k] : k];
    if (w->input_bits == 8) {
        int whole = w->kind == I8;
        float scale = one_bf16(row_scale(to, w->K, whole ? 127 : 448));
        for (long k = 0; k < w->K; k++)
            to[k] = (whole ? rintf(to[k] / scale) : to_e4m3(to[k] / scale)) * scale;
    }
}

// Whole numbers of a stretch of x, [n]: q = round(x / scale), scale = max |x| / LARGEST. What is
// not finite makes a scale of NaN.
static const float LARGEST = QUADS ? 127 * 256 + 127 : 32767;           // of low + 256 high
static Whole to_whole(const float *x, int16_t *q, long n) {
    float most = 0, bad = 0;
    int32_t total = 0;
    #pragma omp simd reduction(max:most) reduction(+:bad)
    for (long i = 0; i < n; i++) {
        most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
        bad += 0 * x[i];
    }
    if (bad != bad) {
        memset(q, 0, n * sizeof *q);
        return (Whole){ bad, 0 };
    }
    float by = most > 1e-30f ? LARGEST / most : 0;
    #pragma omp simd reduction(+:total)
    for (long i = 0; i < n; i++) {
        int32_t one = (int32_t)rintf(x[i] * by);
        q[i] = one;
        total += one;
    }
    return (Whole){ most / LARGEST, total };
}

// Where column i of a unit lies among its bytes: INT4's hold columns 0 4 1 5, then 2 6 3 7.
INLINE long byte_of(long kind, long i) { return kind == I4 ? i % 4 * 2 + i / 4 : i; }

// Whole numbers of a row of x, [n], as quads: low bytes of four columns, then their high ones.
static void make_quads(int16_t *q, long n, long kind) {
    long unit = COLUMNS[kind];
    for (long k = 0; k < n; k += unit, q += unit) {
        int8_t quads[2][2][4];
        for (long i = 0; i < unit; i++) {
            long b = byte_of(kind, i);
            int8_t low = q[i];
            quads[b / 4][0][b % 4] = low, quads[b / 4][1][b % 4] = (q[i] - low) / 256;
        }
        memcpy(q, quads, unit * sizeof *q);
    }
}

// The threads of a loop wait for each other: where another program interrupts one, all wait. After
// a WAIT that was most of its loop, half as many threads run, PyTorch's too, for a rest. A rest is
// twice as long as the last one, if that ended less than SOON ago.
enum { WAIT = 1000000, SOON = 100000000, REST = 10000000 };             // nanoseconds
static const long LONGEST_REST = 2000000000;
static _Thread_local struct { long until, length; int all, fewer; } resting;

static long now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000L + time.tv_nsec;
}

// Of a loop that began at this time: its first thread was done at `first`, its last at `last`.
void notice(long began, long first, long last) {
    int threads = omp_get_max_threads(), resting_now = threads == resting.fewer;
    if (resting_now && last > resting.until) {
        omp_set_num_threads(resting.all);
        resting.fewer = 0;
    }
    if (last - first < WAIT || 2 * (last - first) < last - began) return;
    if (!resting_now) {
        int soon = last - resting.until < SOON;
        resting.length = soon ? least(2 * resting.length, LONGEST_REST) : REST;
        resting.all = threads;
    }
    resting.fewer = threads / 2;
    resting.until = last + resting.length;
    omp_set_num_threads(resting.fewer);
}

// Of tiles.c, which comes after this file.
static long tile_rows(const Weight *w, long T);
static long row_bytes(const Weight *w);
static void row_to_tiles(const Weight *w, const float *x, Whole *whole, char *to, long apart,
                         long next);
static void some_tiles(const Weight *w, Rows x, float *y, long T, long N, long first, long last);

// y = x Wᵀ + bias. x: float32[T, K]; y: float32[T, N].
void product(const float *x, const Weight *w, float *y, long T) {
    long N = w->N, K = w->K, panels = parts(N, WIDE), whole = WHOLE[w->kind], bytes = whole ? 2 : 4;
    long stretch = least(w->group, STRETCH), stretches = parts(K, stretch), R = tile_rows(w, T);
    long row = R ? row_bytes(w) : parts(K, COLUMNS[w->kind]) * COLUMNS[w->kind] * bytes;
    long tile = R * row / (whole ? stretches : 1), next = R ? parts(T, R) * tile : 0;
    long ordered = w->order || w->input_bits == 8;
    long moves = R || whole || ordered || row != K * bytes;
    float *full = N % WIDE ? allocate(T * panels * WIDE * sizeof *full) : y;
    char *moved = moves ? allocate((T + R) * row) : 0;                  // the last tile is whole
    Whole *wholes = whole ? malloc(T * stretches * sizeof *wholes) : 0;
    #pragma omp parallel for if (moves && T * K > 1 << 13)
    for (long t = 0; t < (moves ? T : 0); t++) {
        char *to = R ? moved + t / R * tile + t % R * 64 : moved + t * row;
        float in_order[ordered ? K : 1];
        const float *from = ordered ? in_order : x + t * K;
        if (ordered) arrange(w, x + t * K, in_order);
        if (!R) memset(to + K * bytes, 0, row - K * bytes);             // what is beyond K
        if (R) row_to_tiles(w, from, wholes + t * stretches, to, R * 64, next);
        else if (!whole) memcpy(to, from, K * sizeof *from);
        else for (long k = 0, i = t * stretches; k < K; k += stretch, i++)
            wholes[i] = to_whole(from + k, (int16_t *)to + k, least(K - k, stretch));
        if (!R && whole && QUADS) make_quads((int16_t *)to, row / 2, w->kind);
    }
    Rows all = { moves ? moved : (const char *)x, wholes, K, row, bytes, stretches, R, tile, next };
    long near = parts(T, parts(T, R ? NEAR_TILES : NEAR));              // nearly as many each time
    if (R) near = parts(near, R) * R;                                   // whole tiles
    long began = now(), first = INT64_MAX, last = 0;
    #pragma omp parallel reduction(min:first) reduction(max:last) if (T * N * K > 1 << 16)
    {
        long threads = omp_get_num_threads(), me = omp_get_thread_num();
        for (long t = 0; t < T; t += near) {
            Rows some = all;
            some.x += R ? t / R * tile : t * row, some.whole += t * stretches;
            (R ? some_tiles : some_panels)(w, some, full + t * panels * WIDE, least(near, T - t),
                                           panels * WIDE, panels * me / threads,
                                           panels * (me + 1) / threads);
        }
        first = last = now();
    }
    notice(began, first, last);
    for (long t = 0; full != y && t < T; t++)
        memcpy(y + t * N, full + t * panels * WIDE, N * sizeof *y);
    for (long t = 0; w->bias && t < T; t++) for (long n = 0; n < N; n++) y[t * N + n] += w->bias[n];
    if (full != y) free(full);
    free(moved), free(wholes);
}

// Some rows of W as numbers: [R, K] -> 0; where there is no such row, its place in `which`, and 1.
long rows(const Weight *w, const int64_t *which, float *out, long R) {
    float room[STRETCH * WIDE] __attribute__((aligned(64)));
    const int8_t *quads = (const int8_t *)room;
    long K = w->K, stretch = least(w->group, STRETCH);
    for (long r = 0; r < R; r++, out += K) {
        if (which[r] < 0 || which[r] >= w->N) return r + 1;
        for (long k = 0, lane = which[r] % WIDE, n; k < K; k += stretch) {
            Stretch a = stretch_at(w, which[r] / WIDE, k, n = least(K - k, stretch));
            float scale = scales(&a, lane / LANES * LANES)[lane % LANES];
            float zero = !a.zero ? a.common_zero : a.float_zeros ? ((const float *)a.zero)[lane]
                : ((const int16_t *)a.zero)[lane];
            unfold[w->kind](&a, 1, room);
            for (long i = 0; i < n; i++) {
                long b = i / 8 * 8 + byte_of(w->kind, i % 8);
                int16_t one;                                            // of a pair
                memcpy(&one, quads + (i / 2 * WIDE + lane) * 4 + i % 2 * 2, sizeof one);
                float q = QUADS ? quads[(b / 4 * WIDE + lane) * 4 + b % 4] : one;
                float value = WHOLE[w->kind] ? q - zero : room[i * WIDE + lane];
                out[w->order ? w->order[k + i] : k + i] = value * scale;
            }
        }
    }
    return 0;
}
