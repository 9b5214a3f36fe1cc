// A product's inner loop: up to 6 rows of x by up to 4 panels of W, over a stretch of columns.
// native.py explains the order in memory. The other files are compiled after this one.
//
// W in 32, 16 or 8 bits of floating point, or in NF4, is multiplied as float32 ("real"):
//
//     y[t, n] += scale[n] Σ_k x[t, k] w[n, k]                 fma, a column at a time
//
// W in whole numbers, INT8 or INT4, is multiplied as whole numbers ("whole"). x becomes 16 bits,
// with a scale for each row and stretch (products.c); the sums are exact:
//
//     y[t, n] += scale[n] scale[t] (Σ_k x[t, k] w[n, k] − zero[n] Σ_k x[t, k])
//                                  vpmaddwd, or vpdpwssd where there is VNNI: two columns at a time
//                                  sdot on ARM: four columns, x in two bytes, low + 256 high
//
//     T rows of x · N rows, K columns of W · panel: WIDE rows of W, side by side
//     step: what one instruction multiplies in a lane, a column (real), two or four (whole)
//     unit: one or more steps of a panel, which lie together

#if defined GNU_THREADS && defined __clang__
#error clang asks for the threads of LLVM's OpenMP, and PyTorch has GCC's: CC=gcc
#endif
#include <limits.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef __x86_64__
#include <immintrin.h>
#elif defined __aarch64__
#include <arm_neon.h>
#endif
#ifdef __ARM_FEATURE_DOTPROD
enum { QUADS = 1 };                                 // steps of four columns
#else
enum { QUADS = 0 };
#endif
// STRETCH: columns that one sum runs over; TILE: rows of x multiplied at once. Quads have two sums.
enum { WIDE = 16, STRETCH = 128, TILE = 6, TILE_WHOLE = QUADS ? 3 : TILE };
// PANELS: at once; the sums of T rows of x by so many fit in the registers.
#ifdef __AVX512F__
enum { LANES = 16 };                                // numbers in a register
#define PANELS(T) 4
#elif defined __aarch64__
enum { LANES = 4 };
#define PANELS(T) ((T) > 1 ? 1 : 2)
#else
enum { LANES = 8 };
#define PANELS(T) ((T) > 2 ? 1 : (T) > 1 ? 2 : 4)
#endif
enum { VECS = WIDE / LANES };                       // of a panel
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef float eight __attribute__((vector_size(32)));
typedef float four __attribute__((vector_size(16)));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1)));
typedef int16_t shorts __attribute__((vector_size(2 * LANES), aligned(2)));
typedef uint16_t halves __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint64_t longs __attribute__((vector_size(4 * LANES)));
typedef uint16_t ushorts __attribute__((vector_size(2 * LANES), aligned(2)));
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
// From a line of the processor's cache on; macOS allocates whole ones.
INLINE void *allocate(long bytes) { return aligned_alloc(64, (bytes + 63) / 64 * 64); }

// ---- Registers ----------------------------------------------------------------------------------

// One instruction each, which compilers may miss. pairs_i8: two bytes of each lane as two shorts.
// dot: s + a₀ b₀ + a₁ b₁ in each lane, of shorts. larger, smaller: NaN, if b is.
INLINE vec load_f32(const float *p) { return *(const vec *)p; }
INLINE vec each(float x) { return x - (vec){0}; }   // in each lane (0 + x would cost an addition)
#ifdef __AVX512BW__
INLINE ints widen_u16(const uint16_t *p) {
    return (ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p));
}
INLINE ints widen_i16(const int16_t *p) {
    return (ints)_mm512_cvtepi16_epi32(_mm256_loadu_si256((const void *)p));
}
INLINE ints widen_i8(const int8_t *p) {
    return (ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p));
}
INLINE ints pairs_i8(const int8_t *p) {
    return (ints)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)p));
}
INLINE vec number(ints i) { return (vec)_mm512_cvtepi32_ps((__m512i)i); }
INLINE vec larger(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vec smaller(vec a, vec b) { return (vec)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE ints dot(ints s, ints a, ints b) {
#ifdef __AVX512VNNI__
    return (ints)_mm512_dpwssd_epi32((__m512i)s, (__m512i)a, (__m512i)b);
#else
    return s + (ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#endif
}
#elif defined __AVX2__ && !defined __AVX512F__
INLINE ints widen_u16(const uint16_t *p) {
    return (ints)_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p));
}
INLINE ints widen_i16(const int16_t *p) {
    return (ints)_mm256_cvtepi16_epi32(_mm_loadu_si128((const void *)p));
}
INLINE ints widen_i8(const int8_t *p) {
    return (ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p));
}
INLINE ints pairs_i8(const int8_t *p) {
    return (ints)_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)p));
}
INLINE vec number(ints i) { return (vec)_mm256_cvtepi32_ps((__m256i)i); }
INLINE vec larger(vec a, vec b) { return (vec)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vec smaller(vec a, vec b) { return (vec)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE ints dot(ints s, ints a, ints b) {
#ifdef __AVXVNNI__
    return (ints)_mm256_dpwssd_avx_epi32((__m256i)s, (__m256i)a, (__m256i)b);
#else
    return s + (ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}
#elif defined __aarch64__
INLINE ints widen_u16(const uint16_t *p) { return (ints)vmovl_u16(vld1_u16(p)); }
INLINE ints widen_i16(const int16_t *p) { return (ints)vmovl_s16(vld1_s16(p)); }
INLINE ints widen_i8(const int8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    int8x8_t twice = vreinterpret_s8_s32(vdup_n_s32(four));
    return (ints)vmovl_s16(vget_low_s16(vmovl_s8(twice)));
}
INLINE ints pairs_i8(const int8_t *p) { return (ints)vmovl_s8(vld1_s8(p)); }
INLINE vec number(ints i) { return (vec)vcvtq_f32_s32((int32x4_t)i); }
INLINE vec larger(vec a, vec b) { return (vec)vmaxq_f32((float32x4_t)a, (float32x4_t)b); }
INLINE vec smaller(vec a, vec b) { return (vec)vminq_f32((float32x4_t)a, (float32x4_t)b); }
INLINE ints dot(ints s, ints a, ints b) {
    int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
    int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y)), high = vmull_high_s16(x, y);
    return s + (ints)vpaddq_s32(low, high);
}
#else
INLINE ints widen_u16(const uint16_t *p) {
    return __builtin_convertvector(*(const ushorts *)p, ints);
}
INLINE ints widen_i16(const int16_t *p) {
    return __builtin_convertvector(*(const shorts *)p, ints);
}
INLINE ints widen_i8(const int8_t *p) { return __builtin_convertvector(*(const bytes *)p, ints); }
INLINE ints pairs_i8(const int8_t *p) {
    ints both = widen_i16((const int16_t *)p);
    return (both << 24 >> 24 & 0xFFFF) | both >> 8 << 16;
}
INLINE vec number(ints i) { return __builtin_convertvector(i, vec); }
INLINE vec larger(vec a, vec b) {
    ints is_a = a > b;
    return (vec)((is_a & (ints)a) | (~is_a & (ints)b));
}
INLINE vec smaller(vec a, vec b) { return -larger(-a, -b); }
INLINE ints dot(ints s, ints a, ints b) {
    return s + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
}
#endif
// a b + c, rounded once. Nothing else is (-ffp-contract=off): compilers would do so here and not
// there, and a row would depend on which code it meets.
INLINE vec fused(vec a, vec b, vec c) {
#ifdef __aarch64__
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined __AVX512F__
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined __FMA__
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}
INLINE vec load_bf16(const uint16_t *p) { return (vec)(widen_u16(p) << 16); }
INLINE vec load_f16(const uint16_t *p) {
#ifdef __AVX512F__
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)p));
#elif defined __F16C__
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const void *)p));
#elif defined __aarch64__
    return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else                                               // a finite one: its exponent is smaller by 112
    ints bits = widen_u16(p);
    return (vec)((bits & 0x8000) << 16 | (bits & 0x7FFF) << 13) * 0x1p112f;
#endif
}
INLINE vec load_i8(const int8_t *p) { return number(widen_i8(p)); }
INLINE float one_f32(float x) { return x; }
INLINE float one_i8(int8_t x) { return x; }
INLINE float one_bf16(uint16_t x) {
    union { uint32_t i; float f; } u = { (uint32_t)x << 16 };
    return u.f;
}

INLINE uint16_t to_bf16(float x) {                  // to the nearest, ties to even
    union { float f; uint32_t i; } u = { x };
    return x != x ? 0x7FC0 : (u.i + 0x7FFF + (u.i >> 16 & 1)) >> 16;
}

INLINE float sum(vec v) {
#ifdef __aarch64__
    return (v[0] + v[1]) + (v[2] + v[3]);
#else
    union { vec all; eight half[LANES / 8]; } u = { v };
    union { eight all; four half[2]; } w = {
        LANES == 16 ? u.half[0] + u.half[LANES / 8 - 1] : u.half[0] };
    four f = w.half[0] + w.half[1];
    return (f[0] + f[1]) + (f[2] + f[3]);
#endif
}

// The first n numbers, if there are fewer than LANES, and `others` behind them.
INLINE vec load_some(const float *p, long n, float others) {
    vec v = each(others);
    if (n >= LANES) return load_f32(p);
    if (n > 0) memcpy(&v, p, n * sizeof *p);
    return v;
}
INLINE void store_some(float *p, vec v, long n) {
    if (n >= LANES) *(vec *)p = v;
    else memcpy(p, &v, n * sizeof *p);
}

// `sum` of each of four, in the same order.
INLINE four sums(const vec *v) {
#ifdef __AVX512F__
#define QUARTERS(a, b, which) _mm512_shuffle_f32x4((__m512)(a), (__m512)(b), which)
    __m512 ab = QUARTERS(v[0], v[1], 0x44) + QUARTERS(v[0], v[1], 0xEE);
    __m512 cd = QUARTERS(v[2], v[3], 0x44) + QUARTERS(v[2], v[3], 0xEE);
    __m512 f = QUARTERS(ab, cd, 0x88) + QUARTERS(ab, cd, 0xDD);
    f += _mm512_permute_ps(f, 0xB1);                // f[0] + f[1], f[2] + f[3] of each
    f += _mm512_permute_ps(f, 0x4E);
    __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    return (four)_mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, f));
#elif defined __AVX2__
#define HALVES(a, b, which) _mm256_permute2f128_ps((__m256)(a), (__m256)(b), which)
    __m256 ab = HALVES(v[0], v[1], 0x20) + HALVES(v[0], v[1], 0x31);
    __m256 cd = HALVES(v[2], v[3], 0x20) + HALVES(v[2], v[3], 0x31);
    __m256 f = _mm256_hadd_ps(ab, cd);              // f[0] + f[1], f[2] + f[3] of a, c, b, d
    f = _mm256_hadd_ps(f, f);
    return (four)_mm_unpacklo_ps(_mm256_castps256_ps128(f), _mm256_extractf128_ps(f, 1));
#elif defined __aarch64__
#define ADDED(a, b) vpaddq_f32((float32x4_t)(a), (float32x4_t)(b))      // neighbours of a, then b
    return (four)ADDED(ADDED(v[0], v[1]), ADDED(v[2], v[3]));
#else
    return (four){ sum(v[0]), sum(v[1]), sum(v[2]), sum(v[3]) };
#endif
}

// ---- Weights ------------------------------------------------------------------------------------

typedef struct {
    const void *w;                              // [panels, units, WIDE]; what is beyond N or K is 0
    const void *scale;                              // [panels, groups, WIDE], or none
    const void *zero;                               // int16, or float32: `float_zeros`; or none
    const float *bias;                              // [N], or none
    const int64_t *order;                           // [K]: column j multiplies x[order[j]]; or none
    long N, K, group, kind;                         // group: columns of a scale
    long scale_type, float_zeros, input_bits;       // scale_type: SCALE_…; input_bits: of x
    long common_zero;                               // the zero of all groups, if there is no `zero`
} Weight;
enum { SCALE_BF16, SCALE_F32, SCALE_F16 };          // what a scale is stored in

// Kinds of numbers: how they are multiplied; steps and bytes of a unit's lane; rows of x beyond
// which W is made into i16 or f32 first (`unfold`).
#define EVERY(_)                                                                                   \
_(f32, real, 1, 4, 1 << 30) _(bf16, real, 2, 4, LANES == 16 ? 32 : LANES == 8 ? 8 : 5)             \
_(i8, whole, 1, COLUMNS_whole, QUADS || LANES == 16 ? 1 << 30 : 24)                                \
_(i4, whole, 8 / COLUMNS_whole, 4, LANES == 8 ? 16 : LANES == 4 && !QUADS ? 5 : 24)                \
_(nf4, real, 8, 4, LANES == 16 ? 24 : 4) _(f8, real, 1, 1, LANES == 16 ? 24 : 8)                   \
_(i16, whole, 1, 4, 1 << 30)
enum { COLUMNS_real = 1, COLUMNS_whole = QUADS ? 4 : 2 };           // of a step
// Where a unit has so many columns, stretches of few units are common: several are one call. Where
// units are shorter, that loop would cost more than the calls.
enum { LONG_UNIT = 8 };
#define STEPS_OF(kind, sort, steps, bytes, few) STEPS_##kind = steps, BYTES_##kind = bytes,
#define COLUMNS_OF(kind, sort, steps, bytes, few) (steps) * COLUMNS_##sort,
#define WHOLE_OF(kind, sort, steps, bytes, few) COLUMNS_##sort > 1,
#define BYTES_OF(kind, sort, steps, bytes, few) bytes,
#define FEW_OF(kind, sort, steps, bytes, few) few,
enum { F32, BF16, I8, I4, NF4, F8, I16 };
enum { EVERY(STEPS_OF) };
static const int COLUMNS[] = { EVERY(COLUMNS_OF) }, WHOLE[] = { EVERY(WHOLE_OF) },
    BYTES[] = { EVERY(BYTES_OF) }, FEW[] = { EVERY(FEW_OF) };
extern float nf4[16];                               // quant.nf4
INLINE long parts(long all, long each) { return (all + each - 1) / each; }
INLINE long least(long a, long b) { return a < b ? a : b; }

// Step c of a unit, of each of LANES rows, before its scale and zero. Of 4 bits, an even column
// lies 16 bits below the odd one after it.
INLINE int place(int column) { return column % 2 * 16 + column / 2 * 4; }
INLINE vec step_f32(const char *w, int c) { return load_f32((const float *)w); }
INLINE ints step_i16(const char *w, int c) { return *(const ints *)w; }
INLINE ints step_i8(const char *w, int c) {
    return QUADS ? *(const ints *)w : pairs_i8((const int8_t *)w);
}
INLINE ints step_i4(const char *w, int c) {
    if (!QUADS && c == 3) return (ints)(*(const halves *)w >> 12);      // with nothing to mask
    return *(const ints *)w >> 4 * c & (QUADS ? 0x0F0F0F0F : 0x000F000F);
}
INLINE vec step_bf16(const char *w, int c) {
    ints both = *(const ints *)w;
    return (vec)(c ? both & -0x10000 : both << 16);
}

INLINE vec step_nf4(const char *w, int c) {
    ints q = *(const ints *)w;
#ifdef __AVX512F__
    return (vec)_mm512_permutexvar_ps((__m512i)(q >> place(c)), _mm512_loadu_ps(nf4));
#elif defined __AVX2__                              // eight numbers at a time, by three bits
    __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(nf4), (__m256i)(q >> place(c)));
    __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(nf4 + 8), (__m256i)(q >> place(c)));
    return (vec)_mm256_blendv_ps(low, high, (__m256)(q << (28 - place(c))));
#elif defined __aarch64__                           // by bytes: 4 i to 4 i + 3
    uint8x16x4_t table = vld1q_u8_x4((const uint8_t *)nf4);
    return (vec)vqtbl4q_u8(table, (uint8x16_t)((q >> place(c) & 15) * 0x04040404 + 0x03020100));
#else
    vec y;
    for (int i = 0; i < LANES; i++) y[i] = nf4[q[i] >> place(c) & 15];
    return y;
#endif
}

// 2^-8 of a number in E4M3, which is float16 with a smaller exponent and fewer bits behind the
// leading one.
INLINE vec step_f8(const char *w, int c) {
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

// ---- Stretches of columns: T rows of x by P panels ----------------------------------------------

typedef struct { float scale; int32_t sum; } Whole; // x of a row and stretch in whole numbers; Σ x

typedef struct {
    const char *w;                                  // the first panel's first unit of the stretch,
    long panel, units;                            // bytes to the next panel's; units of the stretch
    long runs;                                      // stretches, each with a scale of its own
    const char *scale, *zero;                       // the first panel's of the stretch, or none,
    long next, scale_type, float_zeros;             // and numbers from there to the next panel's
    int32_t common_zero;                            // the zero of all, if there is no `zero`
    const char *x;                                  // the first row's first step of the stretch,
    long row;                                       // and steps from a row to the next
    const Whole *whole;                             // of the first row's stretch, if x is whole,
    long stretches;                                 // and from there to the next row's
    float *y;                                      // sums are added here, or begin here, if `first`
    long N, first;
    const char *soon;                      // what is wanted next; as `w`, `panel`, and bytes a unit
    long far, pace;
} Stretch;

// Of each sort: a sum, a step of W, and a step of x.
typedef vec real, w_real;
typedef float x_real;
INLINE vec add_real(vec s, vec w, float x) { return fused(w, each(x), s); }
typedef ints w_whole;
#ifdef __ARM_FEATURE_DOTPROD
typedef struct { ints low, high; } whole;
typedef int64_t x_whole;                            // low bytes of four columns, then high ones
INLINE whole add_whole(whole s, ints w, int64_t x) {
    int8x8_t both = vcreate_s8(x);
    return (whole){ (ints)vdotq_lane_s32((int32x4_t)s.low, (int8x16_t)w, both, 0),
                    (ints)vdotq_lane_s32((int32x4_t)s.high, (int8x16_t)w, both, 1) };
}
INLINE ints joined(whole s) { return s.low + (s.high << 8); }
#else
typedef ints whole;
typedef int32_t x_whole;                            // two columns
INLINE ints add_whole(ints s, ints w, int32_t x) { return dot(s, w, (ints){0} + x); }
INLINE ints joined(ints s) { return s; }
#endif

// The sum of row t, before W's scale; `x` is its stretch, `at` finds the zeros. Whole zeros make
// whole sums. Float32 does for a zero that is a fraction, and for one beyond ±255, which is most of
// its w.
INLINE vec total_real(const Stretch *a, vec s, const Whole *x, long at) { return s; }
INLINE vec total_ints(const Stretch *a, ints s, const Whole *x, long at) {
    if (!a->zero) return number(s - a->common_zero * x->sum) * x->scale;
    vec sum = each(-(float)x->sum);
    if (a->float_zeros)
        return fused(load_f32((const float *)a->zero + at), sum, number(s)) * x->scale;
    ints zero = widen_i16((const int16_t *)a->zero + at), far = (zero > 255) | (zero < -255);
    s -= (zero & ~far) * x->sum;                    // exact in 32 bits
    return fused(number(zero & far), sum, number(s)) * x->scale;
}
INLINE vec total_whole(const Stretch *a, whole s, const Whole *x, long at) {
    return total_ints(a, joined(s), x, at);
}
INLINE vec scales(const Stretch *a, long at) {
    const uint16_t *half = (const uint16_t *)a->scale + at;
    if (!a->scale) return each(1);
    if (a->scale_type == SCALE_F32) return load_f32((const float *)a->scale + at);
    return a->scale_type == SCALE_F16 ? load_f16(half) : load_bf16(half);
}

// A sum is in its register now. Else GCC makes all products of a unit first, and stores them, where
// a product and its addition are two instructions.
#if defined __AVX2__ && !defined __AVX512VNNI__ && !defined __AVXVNNI__
#define SETTLE_whole(sum) __asm__("" : "+v"(sum))
#else
#define SETTLE_whole(sum)
#endif
#define SETTLE_real(sum)

#define BLOCK(kind, sort, T, P, name)                                                              \
static void name(const Stretch *a) {                                                               \
    const x_##sort *x = (const x_##sort *)a->x;                                                    \
    const char *w = a->w, *soon = a->soon;                                                         \
    long runs = STEPS_##kind * COLUMNS_##sort < LONG_UNIT ? 1 : a->runs;                           \
    for (long run = 0; run < runs; run++) {                                                        \
        sort s[T][P][VECS] = {0};                                                                  \
        for (long k = 0; k < a->units; k++) {                                                      \
            UNROLL for (int p = 0; p < P; p++)                                                     \
                __builtin_prefetch(soon + p * a->far, 0, 2);         /* to the second cache */     \
            UNROLL for (int c = 0; c < STEPS_##kind; c++) {                                        \
                w_##sort step[P][VECS];                                                            \
                UNROLL for (int p = 0; p < P; p++) UNROLL for (int v = 0; v < VECS; v++)           \
                    step[p][v] = step_##kind(w + p * a->panel + v * LANES * BYTES_##kind, c);      \
                UNROLL for (int t = 0; t < T; t++)                                                 \
                    UNROLL for (int p = 0; p < P; p++) UNROLL for (int v = 0; v < VECS; v++) {     \
                        s[t][p][v] = add_##sort(s[t][p][v], step[p][v], x[t * a->row + c]);        \
                        if (STEPS_##kind > 1) SETTLE_##sort(s[t][p][v]);                           \
                    }                                                                              \
            }                                                                                      \
            x += STEPS_##kind, w += WIDE * BYTES_##kind, soon += a->pace;                          \
        }                                                                                          \
        UNROLL for (int p = 0; p < P; p++) UNROLL for (int v = 0; v < VECS; v++) {                 \
            long at = p * a->next + run * WIDE + v * LANES;                                        \
            vec scale = scales(a, at);                                                             \
            UNROLL for (int t = 0; t < T; t++) {                                                   \
                const Whole *stretch = a->whole + t * a->stretches + run;                          \
                vec *y = (vec *)(a->y + t * a->N + p * WIDE + v * LANES);                          \
                vec total = total_##sort(a, s[t][p][v], stretch, at);                              \
                *y = fused(total, scale, a->first && !run ? (vec){0} : *y);                        \
            }                                                                                      \
        }                                                                                          \
    }                                                                                              \
}
#define BOTH(kind, sort, T)                                                                        \
BLOCK(kind, sort, T, 1, one_##kind##T) BLOCK(kind, sort, T, PANELS(T), wide_##kind##T)
#define PAIR(kind, T) { one_##kind##T, wide_##kind##T }
#define DECLARE(kind, sort) extern void (*const blocks_##kind[7][2])(const Stretch *);
#define DEFINE(kind, sort) DECLARE(kind, sort)                                                     \
BOTH(kind, sort, 1) BOTH(kind, sort, 2) BOTH(kind, sort, 3)                                        \
BOTH(kind, sort, 4) BOTH(kind, sort, 5) BOTH(kind, sort, 6)                                        \
void (*const blocks_##kind[7][2])(const Stretch *) = { { 0, 0 }, PAIR(kind, 1), PAIR(kind, 2),     \
    PAIR(kind, 3), PAIR(kind, 4), PAIR(kind, 5), PAIR(kind, 6) };
// These are most of what there is to compile. native.py has a compiler define those of one sort,
// while others only declare them.
#ifndef BLOCKS_real
#define BLOCKS_real DEFINE
#endif
#ifndef BLOCKS_whole
#define BLOCKS_whole DEFINE
#endif
#define BLOCKS(kind, sort, ...) BLOCKS_##sort(kind, sort)
#define BLOCKS_OF(kind, ...) blocks_##kind,
EVERY(BLOCKS)
static void (*const (*const blocks[])[2])(const Stretch *) = { EVERY(BLOCKS_OF) };

// The stretch with its panels as f32 or i16, before scale and zero: [P, STRETCH, WIDE], in `room`.
#define UNFOLD(kind, sort, ...)                                                                    \
static Stretch unfold_##kind(const Stretch *a, long P, float *room) {                              \
    Stretch b = *a;                                                                                \
    for (long p = 0; p < P; p++) for (int v = 0; v < VECS; v++) {                                  \
        const char *w = a->w + p * a->panel + v * LANES * BYTES_##kind;                            \
        w_##sort *to = (w_##sort *)(room + p * STRETCH * WIDE + v * LANES);                        \
        for (long k = 0; k < a->units; k++, to += STEPS_##kind * VECS, w += WIDE * BYTES_##kind)   \
            UNROLL for (int c = 0; c < STEPS_##kind; c++)                                          \
                to[c * VECS] = step_##kind(w, c);                                                  \
    }                                                                                              \
    b.w = (const char *)room, b.panel = STRETCH * WIDE * sizeof *room, b.units *= STEPS_##kind;    \
    return b;                                                                                      \
}
#define UNFOLD_OF(kind, ...) unfold_##kind,
EVERY(UNFOLD)
static Stretch (*const unfold[])(const Stretch *, long, float *) = { EVERY(UNFOLD_OF) };
