// INT4 by a few rows of x, as integers. Compiled after blocks.c.
//
// Making numbers of the integers would take most of the time. So x becomes integers, for each row
// and stretch, rounded by at most max|x| / 2^24; sums of whole numbers are exact:
//
//     x ≈ (d0 2^16 + d1 2^8 + d2) · scale,  digits from −128 to 127
//     Σ x (q − zero) = scale · Σ_i 2^(16 − 8 i) (Σ d_i q − zero Σ d_i)
//
// One instruction multiplies four columns of each lane by four digits: bytes q, without a sign, by
// bytes with one.

enum { DIGITS = 3 };
typedef struct Digits { float scale, sums[DIGITS]; } Digits;        // of a row and stretch; Σ d_i

// RUN: units that `some` has room for. FEW_digits: rows beyond which it is faster to make numbers
// of W.
#if defined __AVX512VNNI__
typedef __m512i some;                               // a sum of 32 bits for each lane
enum { RUN = 16, FEW_digits = 12 };
INLINE some dot(some s, ints q, int32_t d) {
    return _mm512_dpbusd_epi32(s, (__m512i)q, _mm512_set1_epi32(d));
}
INLINE ints summed(some s) { return (ints)s; }
#elif defined __AVX512BW__
typedef __m512i some;                               // two sums of 16 bits: 32 columns fit
enum { RUN = 4, FEW_digits = 3 };
INLINE some dot(some s, ints q, int32_t d) {
    return _mm512_add_epi16(s, _mm512_maddubs_epi16((__m512i)q, _mm512_set1_epi32(d)));
}
INLINE ints summed(some s) { return (ints)_mm512_madd_epi16(s, _mm512_set1_epi16(1)); }
#elif defined __AVX2__ && !defined __AVX512F__
typedef __m256i some;
enum { RUN = 4, FEW_digits = 2 };
INLINE some dot(some s, ints q, int32_t d) {
    return _mm256_add_epi16(s, _mm256_maddubs_epi16((__m256i)q, _mm256_set1_epi32(d)));
}
INLINE ints summed(some s) { return (ints)_mm256_madd_epi16(s, _mm256_set1_epi16(1)); }
#else
typedef ints some;
enum { RUN = 16, FEW_digits = 6 };
INLINE some dot(some s, ints q, int32_t d) {
    for (int b = 0; b < 32; b += 8) s += (q >> b & 15) * (int8_t)(d >> b);
    return s;
}
INLINE ints summed(some s) { return s; }
#endif

// Row t of x: [T, K], whole units -> [stretches, T, DIGITS, columns]. What is not finite makes a
// scale of NaN.
static void to_digits(const float *x, long K, long stretch, int8_t *to, long T, long t,
    Digits *told) {
    for (long k = 0; k < K; k += stretch, told++) {
        long n = least(K - k, stretch);
        const float *from = x + t * K + k;
        int8_t *first = to + DIGITS * (T * k + t * n), *second = first + n, *third = second + n;
        float most = 0, bad = 0;
        int32_t a = 0, b = 0, c = 0;
        #pragma omp simd reduction(max:most) reduction(+:bad)
        for (long i = 0; i < n; i++) {
            most = fabsf(from[i]) > most ? fabsf(from[i]) : most;
            bad += 0 * from[i];
        }
        float by = most > 1e-30f ? (127 << 16) / most : 0;
        #pragma omp simd reduction(+:a, b, c)
        for (long i = 0; i < n; i++) {
            int32_t all = (int32_t)rintf(from[i] * by), low = (int8_t)all, high = (all - low) >> 8;
            int32_t middle = (int8_t)high, top = (high - middle) >> 8;
            first[i] = top, second[i] = middle, third[i] = low;
            a += top, b += middle, c += low;
        }
        *told = (Digits){ most / (127 << 16) + bad, { a, b, c } };
    }
}

#define DIGIT_BLOCK(T, P, name)                                                                    \
static void name(const Stretch *a) {                                                               \
    for (int v = 0; v < VECS; v++) {                                                               \
        ints all[T][P][DIGITS] = {0};                                                              \
        const int8_t *x = a->x;                                                                    \
        const char *w = a->w + v * LANES * BYTES_i4, *soon = a->soon;                              \
        for (long k = 0, end; k < a->units; k = end) {                                             \
            some s[T][P][DIGITS] = {0};                                                            \
            end = least(k + RUN, a->units);                                                        \
            for (long i = k; i < end; i++, x += COLUMNS_i4, w += WIDE * BYTES_i4,                  \
                soon += a->pace) {                                                                 \
                if (v == 0)                                                                        \
                    UNROLL for (int p = 0; p < P; p++) __builtin_prefetch(soon + p * a->far);      \
                UNROLL for (int h = 0; h < 8; h += 4) UNROLL for (int p = 0; p < P; p++) {         \
                    ints q = *(const ints *)(w + p * a->panel) >> h & 0x0F0F0F0F;                  \
                    UNROLL for (int t = 0; t < T; t++) UNROLL for (int d = 0; d < DIGITS; d++) {   \
                        const int8_t *at = x + t * a->row + d * (a->row / DIGITS) + h;             \
                        int32_t four = *(const int32_t *)at;                                       \
                        s[t][p][d] = dot(s[t][p][d], q, four);                                     \
                    }                                                                              \
                }                                                                                  \
            }                                                                                      \
            UNROLL for (int p = 0; p < P; p++) UNROLL for (int t = 0; t < T; t++)                  \
                UNROLL for (int d = 0; d < DIGITS; d++) all[t][p][d] += summed(s[t][p][d]);        \
        }                                                                                          \
        UNROLL for (int p = 0; p < P; p++) {                                                       \
            vec by = scales(a, p * a->next + v * LANES);                                           \
            vec zero = -number(widen_i16(a->zero + p * a->next + v * LANES));                      \
            UNROLL for (int t = 0; t < T; t++) {                                                   \
                const Digits *told = a->digits + t * a->groups;                                    \
                vec *y = (vec *)(a->y + t * a->N + p * WIDE + v * LANES), s = {0};                 \
                UNROLL for (int d = 0; d < DIGITS; d++)                                            \
                    s = s * 256 + fused(zero, (vec){0} + told->sums[d], number(all[t][p][d]));     \
                *y = fused(s * told->scale, by, a->first ? (vec){0} : *y);                         \
            }                                                                                      \
        }                                                                                          \
    }                                                                                              \
}
#define PANELS_digits(T) ((T) > 2 ? 1 : LANES == 8 ? 2 : 4 / (T))
#define BOTH_digits(T)                                                                             \
DIGIT_BLOCK(T, 1, one_digits##T) DIGIT_BLOCK(T, PANELS_digits(T), wide_digits##T)
BOTH_digits(1) BOTH_digits(2) BOTH_digits(3) BOTH_digits(4) BOTH_digits(5) BOTH_digits(6)
static void (*const blocks_digits[][2])(const Stretch *) = { { 0, 0 }, PAIR(digits, 1),
    PAIR(digits, 2), PAIR(digits, 3), PAIR(digits, 4), PAIR(digits, 5), PAIR(digits, 6) };
