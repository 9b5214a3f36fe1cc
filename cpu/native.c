// A step of a few tokens on a CPU, but for its products (products.c, compiled before this file).
// native.py calls these functions. Numbers are float32 unless another type is named; arrays are
// contiguous, the last index fastest.
//
//     T tokens · K, N in and out features · C hidden size · F intermediate size · D head size
//     H, G query and key/value heads · V vocabulary

// ---- Between the products -----------------------------------------------------------------------

// e^x = 2^n e^r, |r| ≤ ln 2 / 2 (Cody and Waite 1980); of x below −87, e^−87. By hand: compilers do
// not put a comparison of floats into a register of many, as it might trap.
INLINE vec exponential(vec x) {
    x = smaller(each(88), larger(each(-87), x));
    vec rounded = fused(x, each(1.44269504f), each(12582912));          // n + 1.5 · 2^23
    vec n = rounded - 12582912;
    vec r = fused(n, each(2.12194440e-4f), fused(n, each(-0.693359375f), x));
    vec p = fused(r, each(0.0013888889f), each(0.0083333338f));
    p = fused(r, fused(r, p, each(0.041666667f)), each(0.16666667f));
    p = fused(r, fused(r, fused(r, p, each(0.5f)), each(1)), each(1));
    return p * (vec)(((ints)rounded << 23) + (ints)each(1));            // n is in the lowest bits
}

// The largest of n numbers. Four registers do not wait for each other.
static float largest(const float *x, long n) {
    vec most[4] = { each(-INFINITY), each(-INFINITY), each(-INFINITY), each(-INFINITY) };
    long i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) UNROLL for (int c = 0; c < 4; c++)
        most[c] = larger(most[c], load_f32(x + i + c * LANES));
    for (; i < n; i += LANES) most[0] = larger(most[0], load_some(x + i, n - i, -INFINITY));
    float all = -INFINITY;
    for (int i = 0; i < 4 * LANES; i++) {
        float one = most[i / LANES][i % LANES];
        all = one > all ? one : all;
    }
    return all;
}

// model.Rope: rows of D/2 numbers, `apart` from each other. Token t has row rows[t], or row t where
// there are no rows. Without cos, q and k are rotated already.
typedef struct { const float *cos, *sin; long apart; const int32_t *rows; } Rope;

// Rotate the pairs (i, i + D/2) of a head of token t.
INLINE void rotate(const float *x, const Rope *rope, long t, float *y, long D) {
    long half = D / 2, at = (rope->rows ? rope->rows[t] : t) * rope->apart;
    if (!rope->cos) {
        memcpy(y, x, D * sizeof *y);
        return;
    }
    const float *cos = rope->cos + at, *sin = rope->sin + at;
    for (long i = 0; i < half; i++) {
        float one = x[i], two = x[i + half];
        y[i] = one * cos[i] - two * sin[i];
        y[i + half] = two * cos[i] + one * sin[i];
    }
}

// total = x + delta, y = total / √(mean total² + ε) · weight, of one row. Without delta, total is x
// and is not written.
static void norm_row(const float *x, const float *delta, const float *weight, float *total,
                     float *y, long C, float eps) {
    vec squares = {0};
    for (long i = 0; i < C; i += LANES) {
        vec z = load_some(x + i, C - i, 0);
        if (delta) store_some(total + i, z += load_some(delta + i, C - i, 0), C - i);
        squares = fused(z, z, squares);
    }
    float square = sum(squares);
    float by = 1 / sqrtf(square / C + eps + 0 * square);       // ∞ becomes NaN
    const float *z = delta ? total : x;
    for (long i = 0; i < C; i++) y[i] = z[i] * by * weight[i];
}
void add_norm(const float *x, const float *delta, const float *weight, float *total, float *y,
              long T, long C, float eps) {
    #pragma omp parallel for if (T * C > 1 << 15)
    for (long t = 0; t < T; t++) {
        long row = t * C;
        norm_row(x + row, delta ? delta + row : 0, weight, total + row, y + row, C, eps);
    }
}

// silu(gate) · up. x: [T, 2 F] -> y: [T, F]
void swiglu(const float *x, float *y, long T, long F) {
    #pragma omp parallel for collapse(2) if (T * F > 1 << 14)
    for (long t = 0; t < T; t++)
        for (long at = 0; at < F; at += 1024) {
            const float *gate = x + t * 2 * F + at, *up = gate + F;
            float *out = y + t * F + at;
            long n = least(F - at, 1024);
            for (long i = 0; i < n; i += LANES) {
                vec g = load_some(gate + i, n - i, 0), u = load_some(up + i, n - i, 0);
                store_some(out + i, g / (1 + exponential(-g)) * u, n - i);
            }
        }
}

// ---- Attention ----------------------------------------------------------------------------------
//
//     p_j = e^(q · k_j / √D − the largest) of the keys that a token sees;   out = Σ p_j v_j / Σ p_j
//
// Two ways give the same bits, so a token's row does not depend on what shares its pass. For few
// tokens, keys and values are read as they are stored, a few at a time, by all rows that see them;
// for many they become panels, as weights are. In both, a lane of q · k sums every LANES-th column,
// and lanes are added as `sum` does; Σ p v runs over stretches of 128 keys.

// Keys or values of a cache (quant.py): vectors of D numbers, one after the other.
//
//     F32, BF16   x as it is
//     I8          x = n · scale
//     I4          x = (n − zero / steps) · scale, two n in a byte; each `group` of n has a scale
//                 and a zero: a multiple of 16, or all of them. For one group steps is 1, else 4
typedef struct { void *numbers; uint16_t *scale; int16_t *zero; long kind, group; } Vectors;
static const long EIGHTHS[] = { [F32] = 32, [BF16] = 16, [I8] = 8, [I4] = 4 };  // of a byte

// kvcache.AttentionMetadata. block, head, layer: vectors from one to the next.
typedef struct {
    Vectors keys, values;
    long block_size, block, head, layer;
    const int32_t *block_tables, *positions, *slot_mapping, *cu_seqlens;
    long max_blocks;
} Step;

// The keys and values of a layer, and the blocks of a sequence: its vector j lies in block
// table[j / S], at offset j % S.
typedef struct { Vectors keys, values; const int32_t *table; long S, block, head; } Past;

// The vectors from this one on.
static Vectors vectors_from(Vectors x, long first, long D) {
    x.numbers = (char *)x.numbers + first * D * EIGHTHS[x.kind] / 8;
    if (x.scale) x.scale += first * parts(D, x.group);
    if (x.zero) x.zero += first * parts(D, x.group);
    return x;
}

static Past past_of(const Step *step, long layer, long b, long D) {
    long first = layer * step->layer;
    return (Past){ vectors_from(step->keys, first, D), vectors_from(step->values, first, D),
                   step->block_tables + b * step->max_blocks,
                   step->block_size, step->block, step->head };
}

INLINE long vector_of(const Past *at, long j, long g) {
    return at->table[j / at->S] * at->block + j % at->S + g * at->head;
}

// quant.affine of n numbers: the scale, and the zero, of which `steps` are a step of the grid.
static uint16_t grid(const float *x, long n, float steps, int16_t *zero) {
    float low = x[0], high = x[0], bad = 0;
    for (long i = 0; i < n; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
        bad += 0 * x[i];
    }
    *zero = 0;
    if (bad != bad) return 0x7FC0;
    float far = high > -low ? high : -low, largest = 0x1.FEp127f / 7;
    union { float f; uint32_t i; } u = { high / 15 - low / 15 };
    u.f = u.f > far / 2000 ? u.f : far / 2000;
    u.f = far > 1e38f || u.f > largest ? largest : u.f < 1e-30f ? 1e-30f : u.f;
    u.i = (u.i + 0xFFFF) & 0xFFFF0000;
    *zero = -rintf(low / u.f * steps);
    return u.i >> 16;
}

// Store a vector, rounded as its cache is.
static void store(Vectors at, long vector, const float *x, long D) {
    if (at.kind == F32) memcpy((float *)at.numbers + vector * D, x, D * sizeof *x);
    else if (at.kind == BF16)
        for (long d = 0; d < D; d++) ((uint16_t *)at.numbers)[vector * D + d] = to_bf16(x[d]);
    else if (at.kind == I8) {
        float scale = one_bf16(at.scale[vector] = row_scale(x, D, 127));
        for (long d = 0; d < D; d++)
            ((int8_t *)at.numbers)[vector * D + d] = (int8_t)rintf(x[d] / scale);
    } else {
        uint8_t n[D], *both = (uint8_t *)at.numbers + vector * D / 2;
        long groups = parts(D, at.group), i = vector * groups;
        float steps = groups > 1 ? 4 : 1;
        for (long d = 0; d < D; d += at.group, i++) {
            long end = least(D, d + at.group);
            float scale = one_bf16(at.scale[i] = grid(x + d, end - d, steps, at.zero + i));
            float zero = at.zero[i] / steps;
            for (long e = d; e < end; e++) {
                float y = rintf(x[e] / scale + zero);
                n[e] = y > 0 ? y < 15 ? y : 15 : 0;
            }
        }
        for (long d = 0; d < D; d += 2) both[d / 2] = n[d] | n[d + 1] << 4;
    }
}

// Four times each 4-bit number, in order: LANES of them.
INLINE ints fours(const uint8_t *p) {
#ifdef __AVX512F__
    __m512i byte = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const void *)p));
#elif defined __AVX2__
    int four;
    memcpy(&four, p, 4);
    __m256i byte = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
#else
    longs byte;
    for (int i = 0; i < LANES / 2; i++) byte[i] = p[i];
#endif
    // A byte in each 64 bits: its lower half stays, the upper one comes into the next 32.
    return (ints)((longs)byte << 2 | (longs)byte << 30) & 0x3C;
}

// LANES numbers that are stored at p. zero: in quarters of a step of 4 bits; scale: of a quarter.
INLINE vec decode(int kind, const void *p, float scale, int zero) {
    if (kind == F32) return load_f32(p);
    if (kind == BF16) return load_bf16(p);
    return (kind == I8 ? load_i8(p) : number(fours(p) - zero)) * scale;
}
// n vectors -> rows of whole registers.
INLINE void decode_all(const Vectors *at, int kind, long vector, long n, long D, float *to) {
    const long bytes = LANES * EIGHTHS[kind] / 8;
    const char *p = (const char *)at->numbers + vector * D * EIGHTHS[kind] / 8;
    long groups = parts(D, at->group), i = vector * groups, group = least(D, at->group);
    if (kind < I8 && D % LANES == 0) group = D *= n, n = 1;             // as one long vector
    for (; n > 0; n--)
        for (long d = 0, left; d < D; d += group, i++) {
            float scale = kind < I8 ? 1 : one_bf16(at->scale[i]) * (kind == I4 ? 0.25f : 1);
            int zero = kind == I4 ? groups > 1 ? at->zero[i] : 4 * at->zero[i] : 0;
            for (left = least(group, D - d); left >= LANES; left -= LANES, p += bytes, to += LANES)
                *(vec *)to = decode(kind, p, scale, zero);
            if (left == 0) continue;
            char rest[4 * LANES] = {0};
            memcpy(rest, p, left * EIGHTHS[kind] / 8);
            *(vec *)to = decode(kind, rest, scale, zero);
            p += left * EIGHTHS[kind] / 8, to += LANES;
        }
}

// n vectors, one after the other, as float32: where they are stored, or in `room`. Each takes
// `parts(D, LANES)` registers; numbers beyond D mean nothing.
static const float *fetch(const Vectors *at, long vector, long n, long D, float *room) {
    if (at->kind == F32 && D % LANES == 0) return (const float *)at->numbers + vector * D;
    if (at->kind == F32) decode_all(at, F32, vector, n, D, room);
    else if (at->kind == BF16) decode_all(at, BF16, vector, n, D, room);
    else if (at->kind == I8) decode_all(at, I8, vector, n, D, room);
    else decode_all(at, I4, vector, n, D, room);
    return room;
}

// GCC would read a register's numbers again for each of two rows of x.
#ifdef __AVX2__
#define READ_ONCE(x) __asm__("" : "+v"(x))
#else
#define READ_ONCE(x)
#endif

// p = q · k of n keys. q, k: `wide` numbers each.
static void scores(const float *q, const float *k, float *p, long n, long wide) {
    long j = 0;
    for (; j + 4 <= n; j += 4, k += 4 * wide) {
        vec s[4] = {{0}};
        for (long d = 0; d < wide; d += LANES) UNROLL for (int i = 0; i < 4; i++)
            s[i] = fused(load_f32(q + d), load_f32(k + i * wide + d), s[i]);
        four all = sums(s);
        memcpy(p + j, &all, sizeof all);
    }
    for (; j < n; j++, k += wide) {
        vec s = {0};
        for (long d = 0; d < wide; d += LANES) s = fused(load_f32(q + d), load_f32(k + d), s);
        p[j] = sum(s);
    }
}

// The same to the bit, of some rows of q, [TOGETHER, D], and P · WIDE keys of a panel, [D, KEYS]
// -> p, whose rows are `apart`. What is a lane of s there is here a sum of its own, for all keys of
// a register; lanes are added in the order of `sum`, two as soon as there are two.
enum { KEYS = 4 * WIDE, TOGETHER = LANES == 8 ? 2 : 4 };
INLINE void scores_of_panel(const float *q, const float *k, float *p, long apart, int P, long D) {
    enum { LEVELS = LANES == 16 ? 4 : LANES == 8 ? 3 : 2 };
    for (int v = 0; v < VECS; v++) {
        vec waiting[LEVELS + 1][TOGETHER][4];       // sums of 1, 2, 4, … lanes
        _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) {
            int lane = LANES == 16 ? i % 2 * 8 + i / 2 % 2 * 4 + i / 4
                : LANES == 8 ? i % 2 * 4 + i / 2 : i;
            int level = 0;
            vec s[TOGETHER][4] = {0};
            for (long d = lane; d < D; d += LANES) UNROLL for (int c = 0; c < P; c++) {
                vec key = load_f32(k + d * KEYS + c * WIDE + v * LANES);
                READ_ONCE(key);
                UNROLL for (int t = 0; t < TOGETHER; t++)
                    s[t][c] = fused(each(q[t * D + d]), key, s[t][c]);
            }
            UNROLL for (; i >> level & 1; level++)
                UNROLL for (int t = 0; t < TOGETHER; t++)
                    UNROLL for (int c = 0; c < P; c++) s[t][c] += waiting[level][t][c];
            UNROLL for (int t = 0; t < TOGETHER; t++)
                UNROLL for (int c = 0; c < P; c++) waiting[level][t][c] = s[t][c];
        }
        for (int t = 0; t < TOGETHER; t++) for (int c = 0; c < P; c++)
            *(vec *)(p + t * apart + c * WIDE + v * LANES) = waiting[LEVELS][t][c];
    }
}

// out += Σ p · v of n values: [wide].
static void blend(const float *p, const float *v, float *out, long n, long wide) {
    for (long d = 0, some; d < wide; d += some * LANES) {
        some = wide - d < 4 * LANES ? 1 : 4;
        vec s[4];
        const float *from = v + d;
        for (int i = 0; i < some; i++) s[i] = load_f32(out + d + i * LANES);
        if (some == 4) for (long j = 0; j < n; j++, from += wide)
            UNROLL for (int i = 0; i < 4; i++)
                s[i] = fused(each(p[j]), load_f32(from + i * LANES), s[i]);
        else for (long j = 0; j < n; j++, from += wide)
            s[0] = fused(each(p[j]), load_f32(from), s[0]);
        for (int i = 0; i < some; i++) *(vec *)(out + d + i * LANES) = s[i];
    }
}

// p = e^(p − the largest), [n] -> Σ p. Not inlined: two copies might add in two orders.
static __attribute__((noinline)) float exponentials(float *p, long n) {
    float most = largest(p, n);
    vec all = {0};
    long j = 0;
    for (; j + LANES <= n; j += LANES) all += *(vec *)(p + j) = exponential(load_f32(p + j) - most);
    if (j < n) {
        store_some(p + j, exponential(load_some(p + j, n - j, 0) - most), n - j);
        all += load_some(p + j, n - j, 0);
    }
    return sum(all);
}

// How many vectors from j on, but not beyond `end`, lie side by side in a block and a stretch.
INLINE long together(const Past *at, long j, long end) {
    return least(end - j, least(at->S - j % at->S, STRETCH - j % STRETCH));
}

// FEW_TOKENS: up to so many new ones of a sequence look back row by row. ROWS: of them that share a
// look at the keys. QUERIES: rows of a block, where there are more tokens.
enum { FEW_TOKENS = 16, ROWS = 16, QUERIES = 48 };

// One layer's attention: qkv: [T, H + 2 G, D] -> out: [T, H, D]. R = H / G heads of q share a head
// of k and v. norm: kernels.HeadNorm, [2 D], or 0.
typedef struct {
    const float *qkv;
    Rope rope;
    const float *norm;
    float eps, *out;
    long H, G, D, R;
} Layout;

// A head of q or of k of token t, normed and rotated. at: where its weights begin in `norm`.
INLINE void turn(const Layout *a, const float *x, long t, long at, float *y) {
    float normed[a->D];
    if (a->norm) norm_row(x, 0, a->norm + at, 0, normed, a->D, a->eps);
    rotate(a->norm ? normed : x, &a->rope, t, y, a->D);
}

// Row i of the rows that read head g for the tokens from t on: of token t + i / R, head i % R.
INLINE long head_of(const Layout *a, long t, long i, long g) {
    return (t + i / a->R) * a->H + g * a->R + i % a->R;
}

// Its q / √D, rotated: [wide], zeros beyond D.
static void query(const Layout *a, long t, long i, long g, float *q, long wide) {
    long D = a->D, token = t + i / a->R;
    const float *x = a->qkv + (token * (a->H + 2 * a->G) + g * a->R + i % a->R) * D;
    turn(a, x, token, 0, q);
    for (long d = 0; d < D; d++) q[d] /= sqrtf(D);
    for (long d = D; d < wide; d++) q[d] = 0;
}

// Some rows that read head g for the tokens from t on: rows i from `first` on, which see the keys
// up to their own. start: the first token's position.
// room: 64-byte aligned; ROWS times the keys and 3 `wide`, and STRETCH times `wide`.
static void few_look_back(const Layout *a, const Past *past, long t, long start, long first,
                          long rows, long g, float *room) {
    long D = a->D, wide = parts(D, LANES) * LANES, M = start + (first + rows - 1) / a->R + 1;
    float *own = room, *q = own + STRETCH * wide, *sums = q + rows * wide;
    float *some = sums + rows * wide, *p = some + rows * wide, all[rows];
    long seen[rows];
    for (long i = 0; i < rows; i++) {
        query(a, t, first + i, g, q + i * wide, wide);
        seen[i] = start + (first + i) / a->R + 1;
    }
    for (long j = 0, n; j < M; j += n) {
        n = together(past, j, M);
        const float *k = fetch(&past->keys, vector_of(past, j, g), n, D, own);
        for (long i = 0; i < rows; i++)
            scores(q + i * wide, k, p + i * M + j, least(n, seen[i] - j), wide);
    }
    for (long i = 0; i < rows; i++) all[i] = exponentials(p + i * M, seen[i]);
    memset(sums, 0, 2 * rows * wide * sizeof *sums);
    for (long j = 0, n; j < M; j += n) {
        n = together(past, j, M);
        const float *v = fetch(&past->values, vector_of(past, j, g), n, D, own);
        for (long i = 0; i < rows; i++)
            blend(p + i * M + j, v, some + i * wide, least(n, seen[i] - j), wide);
        if ((j + n) % STRETCH && j + n < M) continue;
        for (long d = 0; d < rows * wide; d++) { sums[d] += some[d]; some[d] = 0; }
    }
    for (long i = 0; i < rows; i++) for (long d = 0; d < D; d++)
        a->out[head_of(a, t, first + i, g) * D + d] = sums[i * wide + d] / all[i];
}

// All n new tokens of a sequence from t on, to the bit as one by one: two products for each block
// of queries, with panels made of keys and of values, once.
static void many_look_back(const Layout *a, const Past *past, long t, long start, long n) {
    long G = a->G, D = a->D, R = a->R, tokens = R < QUERIES ? QUERIES / R : 1;
    long M = start + n, keys_wide = parts(M, KEYS) * KEYS, wide = parts(D, WIDE) * WIDE;
    long vecs = parts(D, LANES) * LANES, pieces = parts(M, STRETCH);
    float *keys = allocate(G * keys_wide * D * sizeof *keys);  // [G, panels, D, KEYS]
    float *values = allocate(G * M * wide * sizeof *values);   // [G, D / WIDE, M, WIDE]
    #pragma omp parallel if (M * D * G > 1 << 13)
    {
        long most = parts(tokens * R, TOGETHER) * TOGETHER;     // rows; some may be nobody's
        long numbers = most * (D + keys_wide + wide + 1) + STRETCH * vecs;
        float *own = allocate(numbers * sizeof *own), *p = own + STRETCH * vecs;
        float *sums = p + most * keys_wide, *q = sums + most * wide, *all = q + most * D;
        memset(q, 0, most * D * sizeof *q);
        #pragma omp for collapse(2)
        for (long g = 0; g < G; g++) for (long piece = 0; piece < pieces; piece++) {
            long end = least(M, (piece + 1) * STRETCH);
            for (long j = piece * STRETCH, some; j < end; j += some) {
                some = together(past, j, end);
                long vector = vector_of(past, j, g);
                const float *x = fetch(&past->keys, vector, some, D, own);
                for (long i = j; i < j + some; i++, x += vecs) {
                    float *k = keys + g * keys_wide * D + i / KEYS * D * KEYS + i % KEYS;
                    for (long d = 0; d < D; d++) k[d * KEYS] = x[d];
                }
                x = fetch(&past->values, vector, some, D, own);
                for (long i = j; i < j + some; i++, x += vecs) {
                    float *v = values + g * M * wide + i * WIDE;
                    for (long d = 0; d < D; d += LANES)         // x ends with a whole register
                        *(vec *)(v + d / WIDE * M * WIDE + d % WIDE) = load_f32(x + d);
                }
            }
        }
        #pragma omp for collapse(2) schedule(dynamic)
        for (long block = parts(n, tokens) - 1; block >= 0; block--) for (long g = 0; g < G; g++) {
            long first = block * tokens, rows = least(tokens, n - first) * R;
            long seen = start + first + rows / R;                   // by the block's last token
            Weight v = { .w = values + g * M * wide, .N = wide, .K = M, .group = STRETCH };
            Rows weights = { .x = (char *)p, .K = seen, .row = 4 * keys_wide, .bytes = 4 };
            for (long i = 0; i < rows; i++) query(a, t + first, i, g, q + i * D, D);
            for (long j = 0, some; j < seen; j += some * WIDE) {
                const float *k = keys + g * keys_wide * D + j / KEYS * KEYS * D + j % KEYS;
                some = seen - j > KEYS - WIDE ? 4 : 1;
                for (long i = 0; i < rows; i += TOGETHER) {
                    const float *some_rows = q + i * D;
                    float *to = p + i * keys_wide + j;
                    if (some == 4) scores_of_panel(some_rows, k, to, keys_wide, 4, D);
                    else scores_of_panel(some_rows, k, to, keys_wide, 1, D);
                }
            }
            for (long i = 0; i < rows; i++) {
                long own_keys = start + first + i / R + 1;
                all[i] = exponentials(p + i * keys_wide, own_keys);
                memset(p + i * keys_wide + own_keys, 0, (seen - own_keys) * sizeof *p);
            }
            some_panels(&v, weights, sums, rows, wide, 0, wide / WIDE);
            for (long i = 0; i < rows; i++) for (long d = 0; d < D; d++)
                a->out[head_of(a, t + first, i, g) * D + d] = sums[i * wide + d] / all[i];
        }
        free(own);
    }
    free(keys), free(values);
}

// Into how many parts the rows of a text and head are cut, so that the thread that has the most to
// do has little. Making float32 of keys and values costs each part about as much as two rows do.
static long parts_of(long rows, long tasks) {
    long threads = omp_get_max_threads(), best = 1, least_work = LONG_MAX;
    for (long cut = parts(rows, ROWS); cut <= rows; cut++) {
        long work = parts(tasks * cut, threads) * (parts(rows, cut) + 2);
        if (work < least_work) { least_work = work; best = cut; }
    }
    return best;
}

// kernels.Ops.attend: norm and rotate q and k, store k and v, and let each token look back in its
// own sequence.
static void attend_layer(const Layout *a, const Step *step, long layer, long T) {
    long G = a->G, D = a->D, heads = a->H + 2 * G, wide = parts(D, LANES) * LANES;
    long longest = 0, work = 0, num_tasks = 0, few = 0;
    struct { long t, b, first, rows; } *tasks = malloc(T * a->R * sizeof *tasks);
    Past past = past_of(step, layer, 0, D);
    #pragma omp parallel for if (T * G * D > 1 << 14)
    for (long t = 0; t < T; t++) {
        long place = step->slot_mapping[t] / past.S * past.block + step->slot_mapping[t] % past.S;
        for (long g = 0; g < G; g++) {
            const float *k = a->qkv + (t * heads + a->H + g) * D;
            float rotated[D];
            turn(a, k, t, D, rotated);
            store(past.keys, place + g * past.head, rotated, D);
            store(past.values, place + g * past.head, k + G * D, D);
        }
    }
    // A step of drafts is a part of its metadata: T may end before the sequence does.
    for (long t = 0, b = 0, n; t < T; t += n, b++) {
        n = least(step->cu_seqlens[b + 1], T) - t;
        few += n <= FEW_TOKENS;
    }
    for (long t = 0, b = 0, n; t < T; t += n, b++) {
        long start = step->positions[t];
        n = least(step->cu_seqlens[b + 1], T) - t;
        if (n > FEW_TOKENS) {
            Past own = past_of(step, layer, b, D);
            many_look_back(a, &own, t, start, n);
            continue;
        }
        long cut = parts_of(n * a->R, few * G);
        for (long i = 0, rows, first = 0; i < cut; i++, first += rows) {
            rows = n * a->R / cut + (i < n * a->R % cut);
            tasks[num_tasks].t = t, tasks[num_tasks].b = b;
            tasks[num_tasks].first = first, tasks[num_tasks++].rows = rows;
        }
        longest = start + n > longest ? start + n : longest;
        work += n * (start + n);                    // scores of a head
    }
    #pragma omp parallel if (work * heads * D > 1 << 15)
    {
        float *room = allocate((ROWS * (longest + 3 * wide) + STRETCH * wide) * 4);
        #pragma omp for collapse(2) schedule(dynamic)
        for (long i = 0; i < num_tasks; i++) for (long g = 0; g < G; g++) {
            long t = tasks[i].t;
            Past own = past_of(step, layer, tasks[i].b, D);
            few_look_back(a, &own, t, step->positions[t], tasks[i].first, tasks[i].rows, g, room);
        }
        free(room);
    }
    free(tasks);
}

// qkv: [T, H + 2 G, D] -> out: [T, H, D]; cos, sin: [T, D/2], or none; norm: [2 D], or none.
void attend(const float *qkv, const float *cos, const float *sin, const float *norm, float eps,
            float *out, const Step *step, long layer, long T, long H, long G, long D) {
    Layout layout = { qkv, { cos, sin, D / 2, 0 }, norm, eps, out, H, G, D, H / G };
    attend_layer(&layout, step, layer, T);
}

// ---- All layers ---------------------------------------------------------------------------------

// The layers of model.Llama and its last norm.
typedef struct {
    const float *input_norm, *head_norm, *post_norm;
    const Weight *qkv, *o, *gate_up, *down;
} Layer;
typedef struct {
    const Layer *layers;
    const float *norm;
    const Weight *embed, *head;
    long L, H, G, D;
    float eps;
} Model;

// Rows of a pass. in: what q, k and v are made of, or gate and up; wide: these; narrow: what they
// become; delta: what a layer adds to the stream x, which waits there for the next norm.
typedef struct { float *in, *delta, *wide, *narrow; } Room;
static Room room_for(const Model *m, long T) {
    const Layer *l = m->layers;
    long in = l->qkv->K, delta = l->o->N;           // an EAGLE head's qkv multiplies twice as much
    long wide = l->gate_up->N > l->qkv->N ? l->gate_up->N : l->qkv->N;
    long narrow = l->down->K > l->o->K ? l->down->K : l->o->K;
    float *all = allocate(T * (in + delta + wide + narrow) * sizeof *all);
    return (Room){ all, all + T * in, all + T * (in + delta), all + T * (in + delta + wide) };
}

// A layer behind its first norm. layer: of the cache; angles: [positions, 2, D/2], cos before sin.
static void layer_of(const Model *m, const Layer *l, float *x, const Room *room,
                     const float *angles, const Step *step, long layer, long T) {
    Rope rope = { angles, angles + m->D / 2, m->D, step->positions };
    Layout layout = { room->wide, rope, l->head_norm, m->eps, room->narrow,
                      m->H, m->G, m->D, m->H / m->G };
    product(room->in, l->qkv, room->wide, T);
    attend_layer(&layout, step, layer, T);
    product(room->narrow, l->o, room->delta, T);
    add_norm(x, room->delta, l->post_norm, x, room->in, T, l->o->N, m->eps);
    product(room->in, l->gate_up, room->wide, T);
    swiglu(room->wide, room->narrow, T, l->down->K);
    product(room->narrow, l->down, room->delta, T);
}

// x: [T, C], overwritten -> out: [T, C]. features: [T, wanted, C], x as it comes into these layers.
void layers(const Model *m, float *x, float *out, const float *angles, const Step *step, long T,
            const long *feature_layers, long wanted, float *features) {
    const Layer *l = m->layers;
    long C = l->qkv->K;
    Room room = room_for(m, T);
    for (long i = 0; i < m->L; i++, l++) {
        add_norm(x, i ? room.delta : 0, l->input_norm, x, room.in, T, C, m->eps);
        for (long f = 0; f < wanted; f++) {
            if (feature_layers[f] != i) continue;
            for (long t = 0; t < T; t++)
                memcpy(features + (t * wanted + f) * C, x + t * C, C * sizeof *x);
        }
        layer_of(m, l, x, &room, angles, step, i, T);
    }
    add_norm(x, room.delta, m->norm, x, out, T, C, m->eps);
    free(room.in);
}

// ---- The rng -----------------------------------------------------------------------------------

INLINE uint64_t mix(uint64_t z) {                   // sampling.py: SplitMix64's finalizer
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
}

// A u in (0, 1) with 52 random bits, made of the bits of a number in [1, 2).
INLINE double uniform_of(uint64_t z) {
    union { uint64_t i; double d; } one = { z >> 12 | 0x3FF0000000000000 };
    return (one.d - 1) + 0x1p-53;
}
// −log u; log(2^n m) = n log 2 + 2 artanh((m − 1) / (m + 1))
INLINE double exponential_of(double uniform) {
    union { double d; uint64_t i; } u = { uniform };
    int64_t n = (int64_t)(u.i - 0x3FE6A09E667F3BCD) >> 52;
    u.i -= (uint64_t)n << 52;                       // m: from √½ to √2
    double s = (u.d - 1) / (u.d + 1), w = s * s;
    double p = 1./19 + w * (1./21 + w * (1./23));
    p = 1./11 + w * (1./13 + w * (1./15 + w * (1./17 + w * p)));
    p = 1./3 + w * (1./5 + w * (1./7 + w * (1./9 + w * p)));
    return -(n * 0.6931471803691238 + (2 * s + (2 * s * w * p + n * 1.9082149292705877e-10)));
}

// argmax of p / E: an index with these probabilities; `picked` if no p is above 0.
// As E = −log u ≥ 1 − u, a p up to (1 − u) · the best so far cannot win: few logarithms are needed.
#define PICK(kind, type)                                                                           \
INLINE int64_t one_pick_##kind(const type *p, int64_t stream, long V, int64_t picked) {            \
    uint64_t start = mix((uint64_t)stream);                                                        \
    double best = -1, u[256], score[256];                                                          \
    for (long at = 0; at < V; at += 256, p += 256) {                                               \
        long n = least(V - at, 256), can_win = 0;                                                  \
        type mass = 0;                                                                             \
        _Pragma("omp simd reduction(+:mass)")                                                      \
        for (long i = 0; i < n; i++) mass += p[i];                                                 \
        if (mass == 0) continue;                                                                   \
        double beaten = best * (1 - 1e-9) - 1e-300;                    /* by more than rounding */ \
        for (long i = 0; i < n; i++) {                                                             \
            u[i] = uniform_of(mix(start + (at + i + 1) * 0x9E3779B97F4A7C15));                     \
            can_win |= p[i] > (1 - u[i]) * beaten;                                                 \
        }                                                                                          \
        if (!can_win) continue;                                                                    \
        for (long i = 0; i < n; i++) score[i] = p[i] / exponential_of(u[i]);                       \
        for (long i = 0; i < n; i++)                                                               \
            if (score[i] > best) { best = score[i]; picked = at + i; }                             \
    }                                                                                              \
    return picked;                                                                                 \
}                                                                                                  \
void pick_##kind(const type *probs, const int64_t *streams, int64_t *picked, long B, long V) {     \
    _Pragma("omp parallel for if (B > 1 && B * V > 1 << 14)")                                      \
    for (long b = 0; b < B; b++)                                                                   \
        picked[b] = one_pick_##kind(probs + b * V, streams[b], V, picked[b]);                      \
}
PICK(f32, float)
PICK(f64, double)

// residual = max(w p − q, 0): [V] -> its sum, of sums of 512 as in `soften`
static double residual_of(const float *p, const float *q, float w, float *residual, long V) {
    double mass = 0;
    for (long at = 0; at < V; at += 512) {
        long end = least(V, at + 512);
        float sum = 0;
        #pragma omp simd reduction(+:sum)
        for (long i = at; i < end; i++) {
            float rest = w * p[i] - q[i];
            residual[i] = rest > 0 ? rest : 0;
            sum += residual[i];
        }
        mass += sum;
    }
    return mass;
}

// speculative.verify_block. p, q: [B, k + 1, V]; drafted: [B, k], decided on in the roles
// first_role, first_role + 2, … of `keys`; streams: of the picks. ended: of each text how many
// drafts are accepted, then of each the token after them. room: B · (V + k + 1).
void verify_drafts(const float *p, const float *q, const int64_t *drafted, const int64_t *keys,
            const int64_t *streams, int64_t *ended, float *room, long B, long k, long V,
            int64_t first_role) {
    #pragma omp parallel for if (B > 1 && B * V > 1 << 14)
    for (long b = 0; b < B; b++) {
        const float *p_j = p + b * (k + 1) * V, *q_j = q + b * (k + 1) * V;
        float *residual = room + b * (V + k + 1), *w = residual + V;
        w[0] = 1;
        for (long j = 0; j < k; j++, p_j += V, q_j += V) {
            int64_t x = drafted[b * k + j];
            float ratio = x >= 0 && q_j[x] > 0 ? p_j[x] / q_j[x] : 0;
            w[j + 1] = w[j] * ratio > 1 ? 1 : w[j] * ratio;
        }
        long j = k;
        for (; j > 0 && w[j] != 1; j--, p_j -= V, q_j -= V) {
            if (w[j] == 0) continue;
            double u = (mix((uint64_t)(keys[b] ^ (first_role + 2 * (j - 1)))) >> 12) * 0x1p-52;
            double m = residual_of(p_j, q_j, w[j], residual, V);
            if (u < m / (m + (1 - w[j]))) break;
        }
        // Not divided by its mass: what is picked depends on ratios alone.
        double m = residual_of(p_j, q_j, w[j], residual, V);
        ended[b] = j;
        ended[B + b] = one_pick_f32(m > 0 ? residual : p_j, streams[b], V, 0);
    }
}

// ---- Probabilities, and all drafts of a lone text -----------------------------------------------

// Whether all numbers are finite; −∞ counts as such if it is masked. (0 times the others is NaN.)
static int are_finite(const float *x, long n, long masked) {
    vec lowest = each(masked ? 0 : -INFINITY), zeros = {0};
    for (long i = 0; i < n; i += LANES) zeros += 0 * larger(lowest, load_some(x + i, n - i, 0));
    return sum(zeros) == 0;
}

// softmax(x / t): [V]; of t = 0 the first of the largest. -> what it was divided by: NaN, if x is
// not finite (masked: but for −∞).
static float soften(const float *x, float *p, long V, double temperature, long masked) {
    float most = largest(x, V), t = temperature;
    if (t == 0 && temperature > 0) t = 0x1p-149f;   // the least: the largest share alike
    if ((t == 0 || !masked) && !are_finite(x, V, masked)) return NAN;
    if (t == 0) {
        long first = 0;
        while (largest(x + first, least(512, V - first)) != most) first += 512;
        while (x[first] != most) first++;
        memset(p, 0, V * sizeof *p);
        return p[first] = 1 + 0 * most;
    }
    double total = 0;   // of sums of 512: in a long sum of float32, small numbers are lost
    for (long at = 0; at < V; at += 512) {
        vec all = {0};
        for (long i = at; i < least(V, at + 512); i += LANES) {
            vec z = (load_some(x + i, V - i, 0) - most) / t;
            store_some(p + i, (vec)(~(z < -87) & (ints)exponential(z)), V - i);
            all += load_some(p + i, V - i, 0);
        }
        total += sum(all);
    }
    float all = total;
    for (long i = 0; i < V; i++) p[i] /= all;
    return all;
}

// Those of sampling.probabilities.
typedef struct { double temperature, top_k, top_p, min_p; } Settings;
typedef struct { float logit; uint32_t token; } Candidate;

// Eleven bits of a number that is the smaller, the larger the logit is.
INLINE int digit(float logit, int shift) {
    union { float f; uint32_t i; } bits = { logit + 0.0f };                 // −0 becomes 0
    uint32_t number = bits.i >> 31 ? bits.i : ~bits.i & 0x7FFFFFFF;
    return number >> shift & 2047;
}
// Sort n candidates, the largest logit first, equal ones as they were: by the lowest digit, then by
// the next, and by the highest. -> x or room.
static Candidate *sorted(Candidate *x, Candidate *room, long n) {
    for (int shift = 0; shift < 32; shift += 11) {
        long place[2049] = {0};                     // of the next one with this digit
        for (long i = 0; i < n; i++) place[digit(x[i].logit, shift) + 1]++;
        for (int d = 0; d < 2048; d++) place[d + 1] += place[d];
        for (long i = 0; i < n; i++) room[place[digit(x[i].logit, shift)]++] = x[i];
        Candidate *swap = x;
        x = room, room = swap;
    }
    return x;
}

// Tokens with a logit above this one -> how many.
static long candidates(const float *x, long V, float bound, Candidate *found) {
    long n = 0;
    for (long at = 0, end; at < V; at = end) {
        end = least(V, at + 256);
        if (largest(x + at, end - at) <= bound) continue;
        for (long i = at; i < end; i++) if (x[i] > bound) found[n++] = (Candidate){ x[i], i };
    }
    return n;
}

// Top-k, top-p and min-p: each keeps the first of p, [V], in the order of the logits x. Mostly the
// likely tokens, with e^-8 of the largest p, tell how many; a sort of all would take long.
static void filter(const float *x, float *p, long V, const Settings *settings) {
    long k = settings->top_k >= 1 && settings->top_k < V ? settings->top_k : 0;     // 0: all
    long n, kept;
    if (!k && settings->top_p >= 1 && settings->min_p <= 0) return;
    Candidate *found = malloc(2 * V * sizeof *found), *best;
    double most = largest(x, V), t = settings->temperature, all = 0, mass;
    double last = most + t * log(settings->min_p);  // where p is min_p of the largest
    #pragma omp simd reduction(+:all)
    for (long i = 0; i < V; i++) all += p[i];
    for (float bound = most - 8 * t; ; bound = -INFINITY) {
        n = candidates(x, V, bound, found);
        best = sorted(found, found + V, n);
        if (k) all = 0;
        for (long i = 0; i < least(k, n); i++) all += p[best[i].token];
        for (mass = kept = 0; kept < n; mass += p[best[kept++].token]) {
            if (k && kept == k) break;
            if (mass >= settings->top_p * all && settings->top_p < 1) break;
            if (best[kept].logit < last) break;
        }
        if (bound == -INFINITY || (k ? k <= n : kept < n)) break;   // more would change nothing
    }
    float *share = (float *)found;                  // three digits: the sort ended in its room
    for (long i = 0; i < kept; i++) share[i] = p[best[i].token] / mass;
    memset(p, 0, V * sizeof *p);
    for (long i = 0; i < kept; i++) p[best[i].token] = share[i];
    free(found);
}

// The distribution that is drawn from: [V], made of logits x, not in their place -> whether x is
// finite, as `soften` says.
static int probabilities(const float *x, float *p, long V, const Settings *settings, long masked) {
    if (isnan(soften(x, p, V, settings->temperature, masked))) return 0;
    if (settings->temperature != 0) filter(x, p, V, settings);
    return 1;
}

// x, p: [B, V]; settings: [B] -> how many rows are not finite.
long probabilities_of_rows(const float *x, float *p, const Settings *settings, long B, long V,
                           long masked) {
    long wrong = 0;
    #pragma omp parallel for reduction(+:wrong) if (B > 1 && B * V > 1 << 14)
    for (long b = 0; b < B; b++)
        wrong += !probabilities(x + b * V, p + b * V, V, settings + b, masked);
    return wrong;
}

// k tokens of a sequence, each picked with its own stream before the next pass: drafted[k], −1
// before. q: [k, V], or 0 where nobody reads what they were picked from. x: [T, C], of the tokens
// before them; step: of T + k − 1 tokens.
void drafts(const Model *m, float *x, const float *angles, const Step *step, long T,
            const Settings *settings, const int64_t *streams, int64_t *drafted, float *q, long k,
            long V) {
    long C = m->head->K;
    long N = m->head->N;
    float *out = allocate((T * C + N + V) * sizeof *out), *logits = out + T * C;
    Step now = *step;
    for (long j = 0; j < k; j++) {
        layers(m, x, out, angles, &now, T, 0, 0, 0);
        product(out + (T - 1) * C, m->head, logits, 1);
        float *p = q ? q + j * V : logits + N;
        if (!probabilities(logits, p, V, settings, 0)) break;
        pick_f32(p, streams + j, drafted + j, 1, V);
        rows(m->embed, drafted + j, x, 1);
        now.positions += T, now.slot_mapping += T, T = 1;
    }
    free(out);
}

// ---- EAGLE heads --------------------------------------------------------------------------------

// eagle.EagleHead: `model` has its one layer, whose q, k and v multiply twice C. layer: of the
// cache; tokens: the target's token for each of the head's.
typedef struct {
    Model model;
    const float *hidden_norm;
    const int64_t *tokens;
    long layer, norm_before_residual, norm_output;
} Head;

// EagleHead.forward. f: [T, C] -> z: [T, C], which may be f.
void head_rows(const Head *h, const float *f, const int64_t *tokens, float *z, const float *angles,
               const Step *step, long T) {
    const Model *m = &h->model;
    const Layer *l = m->layers;
    long C = m->head->K;
    Room room = room_for(m, T);
    rows(m->embed, tokens, room.delta, T);
    for (long t = 0; t < T; t++) {
        float *token = room.in + t * 2 * C, *feature = token + C;
        add_norm(room.delta + t * C, 0, l->input_norm, 0, token, 1, C, m->eps);
        add_norm(f + t * C, 0, h->hidden_norm, 0, feature, 1, C, m->eps);
        const float *residual = h->norm_before_residual ? feature : f + t * C;
        memmove(z + t * C, residual, C * sizeof *z);
    }
    layer_of(m, l, z, &room, angles, step, h->layer, T);
    add_norm(z, room.delta, m->norm, z, room.in, T, C, m->eps);
    if (h->norm_output) memcpy(z, room.in, T * C * sizeof *z);
    free(room.in);
}

// k drafts of a sequence, as in `drafts`, from the last z: [C], which is overwritten. As in
// EagleHead.logits, a token that is not the head's has the lowest logit. step: of k − 1 tokens;
// k = 1: none.
void head_drafts(const Head *h, float *z, const float *angles, const Step *step,
                 const Settings *settings, const int64_t *streams, int64_t *drafted, float *q,
                 long k, long V) {
    const Model *m = &h->model;
    long C = m->head->K, n = m->head->N;
    float *y = allocate((C + n + 2 * V) * sizeof *y), *own = y + C, *logits = own + n;
    for (long i = 0; i < V; i++) logits[i] = -0x1.FFFFFEp127f;
    Step now = step ? *step : (Step){ 0 };
    for (long j = 0; j < k; j++) {
        float *p = q ? q + j * V : logits + V;
        if (!h->norm_output) add_norm(z, 0, m->norm, 0, y, 1, C, m->eps);
        product(h->norm_output ? z : y, m->head, own, 1);
        for (long i = 0; i < n; i++) if (h->tokens[i] < V) logits[h->tokens[i]] = own[i];
        if (!probabilities(logits, p, V, settings, 0)) break;
        pick_f32(p, streams + j, drafted + j, 1, V);
        if (j + 1 == k) break;
        head_rows(h, z, drafted + j, z, angles, &now, 1);
        now.positions++, now.slot_mapping++;
    }
    free(y);
}
