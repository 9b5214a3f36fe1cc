// What a product repeats: a few rows of x by a few panels of W, over a stretch of columns. W
// becomes float32 in registers or, beside many rows, first. native.py explains the order in memory.
// The other files are compiled after it.
//
//     T rows of x · N rows, K columns of W · panel: WIDE rows of W, side by side
//     unit: 1, 2 or 8 columns of a panel

#if defined GNU_THREADS && defined __clang__
#error clang asks for the threads of LLVM's OpenMP, and PyTorch has GCC's: CC=gcc
#endif
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __x86_64__
#include <immintrin.h>
#endif
// STRETCH: columns that one sum runs over; TILE: rows of x multiplied at once.
enum { WIDE = 16, STRETCH = 128, TILE = 6 };
// PANELS: at once; the sums of T rows of x by so many fit in the registers.
#ifdef __AVX512F__
enum { LANES = 16 };                                // numbers in a register
#define PANELS(T) 4
#else
enum { LANES = 8 };
#define PANELS(T) ((T) > 3 ? 1 : 2)
#endif
enum { VECS = WIDE / LANES };                       // of a panel
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef float eight __attribute__((vector_size(32)));
typedef float four __attribute__((vector_size(16)));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1)));
typedef int16_t shorts __attribute__((vector_size(2 * LANES), aligned(2)));
typedef uint16_t ushorts __attribute__((vector_size(2 * LANES), aligned(2)));
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

INLINE vec load_f32(const float *p) { return *(const vec *)p; }
#ifdef __AVX512F__                                 // one instruction each, which compilers may miss
INLINE ints widen_u16(const uint16_t *p) {
    return (ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p));
}
INLINE ints widen_i16(const int16_t *p) {
    return (ints)_mm512_cvtepi16_epi32(_mm256_loadu_si256((const void *)p));
}
INLINE ints widen_i8(const int8_t *p) {
    return (ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p));
}
INLINE vec number(ints i) { return (vec)_mm512_cvtepi32_ps((__m512i)i); }
#elif defined __AVX2__
INLINE ints widen_u16(const uint16_t *p) {
    return (ints)_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p));
}
INLINE ints widen_i16(const int16_t *p) {
    return (ints)_mm256_cvtepi16_epi32(_mm_loadu_si128((const void *)p));
}
INLINE ints widen_i8(const int8_t *p) {
    return (ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p));
}
INLINE vec number(ints i) { return (vec)_mm256_cvtepi32_ps((__m256i)i); }
#else
INLINE ints widen_u16(const uint16_t *p) {
    return __builtin_convertvector(*(const ushorts *)p, ints);
}
INLINE ints widen_i16(const int16_t *p) {
    return __builtin_convertvector(*(const shorts *)p, ints);
}
INLINE ints widen_i8(const int8_t *p) { return __builtin_convertvector(*(const bytes *)p, ints); }
INLINE vec number(ints i) { return __builtin_convertvector(i, vec); }
#endif
// a b + c, rounded once: compilers do so here and not there.
INLINE vec fused(vec a, vec b, vec c) {
#ifdef __AVX512F__
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined __FMA__
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}
INLINE vec load_bf16(const uint16_t *p) { return (vec)(widen_u16(p) << 16); }
INLINE vec load_i8(const int8_t *p) { return number(widen_i8(p)); }
INLINE float one_f32(float x) { return x; }
INLINE float one_i8(int8_t x) { return x; }
INLINE float one_bf16(uint16_t x) {
    union { uint32_t i; float f; } u = { (uint32_t)x << 16 };
    return u.f;
}

INLINE float sum(vec v) {
    union { vec all; eight half[LANES / 8]; } u = { v };
    union { eight all; four half[2]; } w = {
        LANES == 16 ? u.half[0] + u.half[LANES / 8 - 1] : u.half[0] };
    four f = w.half[0] + w.half[1];
    return (f[0] + f[1]) + (f[2] + f[3]);
}

// ---- Weights ------------------------------------------------------------------------------------

typedef struct {
    const void *w;                              // [panels, units, WIDE]; what is beyond N or K is 0
    const void *scale;                              // bfloat16 or, if `exact`, float32, or none:
                                                    // [panels, groups, WIDE]
    const int16_t *zero;                            // the same shape, or none
    const float *bias;                              // [N], or none
    const int64_t *order;                           // [K]: column j multiplies x[order[j]]; or none
    long N, K, group, kind, exact, inputs;          // group: columns of a scale; inputs: bits of x
} Weight;

// Kinds of numbers: columns and bytes of a unit's lane; rows of x that do not pay for `unfold`.
// z8: INT8 with zeros.
#define EVERY(_)                                                                                   \
_(f32, 1, 4, 1 << 30) _(bf16, 2, 4, LANES == 16 ? 32 : 8) _(i8, 1, 1, 32)                          \
_(i4, 8, 4, LANES == 16 ? 16 : 8)                                                                  \
_(nf4, 8, 4, LANES == 16 ? 24 : 4) _(f8, 1, 1, LANES == 16 ? 24 : 8) _(z8, 1, 1, 32)
#define SIZES(kind, columns, bytes, few) COLUMNS_##kind = columns, BYTES_##kind = bytes,
#define COLUMNS_OF(kind, columns, bytes, few) columns,
#define BYTES_OF(kind, columns, bytes, few) bytes,
#define FEW_OF(kind, columns, bytes, few) few,
enum { F32, BF16, I8, I4 };
enum { EVERY(SIZES) };
static const int COLUMNS[] = { EVERY(COLUMNS_OF) }, BYTES[] = { EVERY(BYTES_OF) },
    FEW[] = { EVERY(FEW_OF) };
float nf4[16];                                      // quant.nf4, which native.py puts here
INLINE long parts(long all, long each) { return (all + each - 1) / each; }
INLINE long least(long a, long b) { return a < b ? a : b; }

// Column c of a unit, of each of LANES rows, as numbers before their scale.
INLINE vec column_f32(const char *w, int c, ints zero) { return load_f32((const float *)w); }
INLINE vec column_i8(const char *w, int c, ints zero) { return load_i8((const int8_t *)w); }
INLINE vec column_z8(const char *w, int c, ints zero) {
    return number(widen_i8((const int8_t *)w) - zero);
}
INLINE vec column_i4(const char *w, int c, ints zero) {
    return number((*(const ints *)w >> (c % 4 * 8 + c / 4 * 4) & 15) - zero);
}

INLINE vec column_bf16(const char *w, int c, ints zero) {
    ints both = *(const ints *)w;
    return (vec)(c ? both & -0x10000 : both << 16);
}

INLINE vec column_nf4(const char *w, int c, ints zero) {
    int at = c % 4 * 8 + c / 4 * 4;
    ints q = *(const ints *)w;
#ifdef __AVX512F__
    return (vec)_mm512_permutexvar_ps((__m512i)(q >> at), _mm512_loadu_ps(nf4));
#elif defined __AVX2__                              // eight numbers at a time, by three bits
    __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(nf4), (__m256i)(q >> at));
    __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(nf4 + 8), (__m256i)(q >> at));
    return (vec)_mm256_blendv_ps(low, high, (__m256)(q << (28 - at)));
#else
    vec y;
    for (int i = 0; i < LANES; i++) y[i] = nf4[q[i] >> at & 15];
    return y;
#endif
}

// 2^-8 of a number in E4M3, which is float16 with a smaller exponent and fewer bits behind the
// leading one.
INLINE vec column_f8(const char *w, int c, ints zero) {
#ifdef __AVX512F__
    __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)w));
    return (vec)_mm512_cvtph_ps(_mm256_and_si256(
        _mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xBF80)));
#elif defined __F16C__
    __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const void *)w));
    return (vec)_mm256_cvtph_ps(_mm_and_si128(
        _mm_slli_epi16(wide, 7), _mm_set1_epi16((short)0xBF80)));
#else
    return (vec)(widen_i8((const int8_t *)w) << 20 & (int32_t)0x87F00000) * 0x1p112f;
#endif
}

// ---- A stretch of columns: T rows of x by P panels ----------------------------------------------

typedef struct {
    const char *w;                                  // the first panel's first unit of the stretch,
    long panel, units;                            // bytes to the next panel's; units of the stretch
    const char *scale;                              // the first panel's of the stretch, or none,
    const int16_t *zero;
    long next, exact;                               // and numbers from there to the next panel's
    const void *x;                                  // the first row's first column of the stretch,
    long row;                                       // and numbers from a row to the next
    const struct Digits *digits;                    // of the first row's group, for integers.c,
    long groups;                                    // and from there to the next row's
    float *y;                                      // sums are added here, or begin here, if `first`
    long N, first;
    const char *soon;                      // what is wanted next; as `w`, `panel`, and bytes a unit
    long far, pace;
} Stretch;

INLINE ints zeros(const Stretch *a, long at) {
    return a->zero ? widen_i16(a->zero + at) : (ints){0};
}
INLINE vec scales(const Stretch *a, long at) {
    if (!a->scale) return (vec){0} + 1;
    return a->exact ? load_f32((const float *)a->scale + at)
        : load_bf16((const uint16_t *)a->scale + at);
}

#define BLOCK(kind, T, P, name)                                                                    \
static void name(const Stretch *a) {                                                               \
    vec s[T][P][VECS] = {0};                                                                       \
    ints zero[P][VECS];                                                                            \
    UNROLL for (int p = 0; p < P; p++) UNROLL for (int v = 0; v < VECS; v++)                       \
        zero[p][v] = zeros(a, p * a->next + v * LANES);                                            \
    const float *x = a->x;                                                                         \
    const char *w = a->w, *soon = a->soon;                                                         \
    for (long k = 0; k < a->units; k++, x += COLUMNS_##kind, w += WIDE * BYTES_##kind,             \
        soon += a->pace) {                                                                         \
        /* 16 or 32 bits: to the second cache; they fill a first */                                \
        UNROLL for (int p = 0; p < P; p++)                                                         \
            __builtin_prefetch(soon + p * a->far, 0, BYTES_##kind > COLUMNS_##kind ? 2 : 3);       \
        UNROLL for (int c = 0; c < COLUMNS_##kind; c++) {                                          \
            vec column[P][VECS];                                                                   \
            UNROLL for (int p = 0; p < P; p++) UNROLL for (int v = 0; v < VECS; v++)               \
                column[p][v] = column_##kind(w + p * a->panel + v * LANES * BYTES_##kind, c,       \
                    zero[p][v]);                                                                   \
            UNROLL for (int t = 0; t < T; t++) {                                                   \
                float by = x[t * a->row + c];                                                      \
                UNROLL for (int p = 0; p < P; p++) UNROLL for (int v = 0; v < VECS; v++)           \
                    s[t][p][v] = s[t][p][v] + column[p][v] * by;                                   \
            }                                                                                      \
        }                                                                                          \
    }                                                                                              \
    UNROLL for (int p = 0; p < P; p++) UNROLL for (int v = 0; v < VECS; v++) {                     \
        vec by = scales(a, p * a->next + v * LANES);                                               \
        UNROLL for (int t = 0; t < T; t++) {                                                       \
            vec *y = (vec *)(a->y + t * a->N + p * WIDE + v * LANES);                              \
            *y = fused(s[t][p][v], by, a->first ? (vec){0} : *y);                                  \
        }                                                                                          \
    }                                                                                              \
}
#define BOTH(kind, T) BLOCK(kind, T, 1, one_##kind##T) BLOCK(kind, T, PANELS(T), wide_##kind##T)
#define PAIR(kind, T) { one_##kind##T, wide_##kind##T }
#define BLOCKS(kind, ...)                                                                          \
BOTH(kind, 1) BOTH(kind, 2) BOTH(kind, 3) BOTH(kind, 4) BOTH(kind, 5) BOTH(kind, 6)                \
static void (*const blocks_##kind[][2])(const Stretch *) = { { 0, 0 }, PAIR(kind, 1),              \
    PAIR(kind, 2), PAIR(kind, 3),                                                                  \
    PAIR(kind, 4), PAIR(kind, 5), PAIR(kind, 6) };
#define BLOCKS_OF(kind, ...) blocks_##kind,
EVERY(BLOCKS)
static void (*const (*const blocks[])[2])(const Stretch *) = { EVERY(BLOCKS_OF) };

// The stretch with its panels as float32, before the scale: [P, STRETCH, WIDE], in `room`.
#define UNFOLD(kind, ...)                                                                          \
static Stretch unfold_##kind(const Stretch *a, long P, float *room) {                              \
    Stretch b = *a;                                                                                \
    for (long p = 0; p < P; p++) for (int v = 0; v < VECS; v++) {                                  \
        ints zero = zeros(a, p * a->next + v * LANES);                                             \
        const char *w = a->w + p * a->panel + v * LANES * BYTES_##kind;                            \
        vec *to = (vec *)(room + p * STRETCH * WIDE + v * LANES);                                  \
        for (long k = 0; k < a->units; k++, to += COLUMNS_##kind * VECS, w += WIDE * BYTES_##kind) \
            UNROLL for (int c = 0; c < COLUMNS_##kind; c++)                                        \
                to[c * VECS] = column_##kind(w, c, zero);                                          \
    }                                                                                              \
    b.w = (const char *)room, b.panel = STRETCH * WIDE * sizeof *room, b.units *= COLUMNS_##kind;  \
    return b;                                                                                      \
}
#define UNFOLD_OF(kind, ...) unfold_##kind,
EVERY(UNFOLD)
static Stretch (*const unfold[])(const Stretch *, long, float *) = { EVERY(UNFOLD_OF) };
