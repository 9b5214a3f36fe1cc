// y = x Wᵀ where the CPU multiplies tiles, as Intel's AMX does. products.c calls this.
//
// A tile is a register of up to 16 rows of 64 bytes. One instruction adds to R × 16 sums what a
// block of columns gives, 64 of them in bytes or 32 in bfloat16:
//
//     C[t, n] += Σ_k A[t, k] B[k, n]         tdpbssd, tdpbusd: bytes; tdpbf16ps: bfloat16
//
// A has R rows of x, B a panel of W. Each row of x is in two tiles, `high` and `low`:
//
//     INT8, INT4    x = 256 high + low, the whole numbers that blocks.c multiplies: bytes with a
//                   sign, and without. Their sums are exact, so y has the same bits
//     bfloat16      x ≈ high + low, the nearest bfloat16 and the one nearest to the rest: off by at
//                   most 2^-17 |x|. Every product by such a W is made so, of few rows in vectors
//                   (`few_real`) that add in the tiles' order: so the bits of a row do not depend
//                   on how many rows a step has. A sum has LONG columns
//
//     A: [stretches, ⌈T / tile_rows⌉, blocks, 2, tile_rows, 64 bytes]      2: high and low. In
//                                          bfloat16, all columns are one stretch of this array
//     B: [panels, blocks, 16, WIDE, 4 bytes]     four bytes: the same columns as in A
//
// What a block has beyond its stretch is 0 in A; so B may have any number there, but NaN.
//
// A core multiplies tiles faster than it reads memory. So a thread multiplies LONG columns of x,
// which stay in its L2 cache, by those columns of all its panels before it goes on to the next.
// While it multiplies two panels, it fetches the next two, a few lines for each block, and y.

// MOST_BLOCKS: of any stretch of whole numbers. LONG: columns that a sum of bfloat16 runs over.
// FEW_WHOLE, FEW_REAL: the most rows that cost less in vectors.
enum { TILE_ROWS = 16, TILE_BYTES = 1024, MOST_BLOCKS = STRETCH / 64, LONG = 1024,
       FEW_WHOLE = 6, FEW_REAL = 2 };
long has_tiles;                                     // native.py asks before the first product

#if defined __AMX_INT8__ && defined __AMX_BF16__ && defined __linux__
// ---- The instructions ---------------------------------------------------------------------------

#include <sys/syscall.h>
#include <unistd.h>
// The system lends these registers to programs that ask: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA.
long ask_for_tiles() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }
// Tiles 0 to 3 are sums; 4 and 5 are of A, 6 and 7 of B.
static void begin_tiles(long R) {
    struct {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shapes = { .palette = 1 };
    for (int c = 0; c < 8; c++) shapes.bytes[c] = 64, shapes.rows[c] = c < 6 ? R : TILE_ROWS;
    __asm__ volatile("ldtilecfg %0" :: "m"(shapes));
}
// PyTorch multiplies tiles in the same threads: oneDNN loads its shapes again, whoever was here.
static void end_tiles(void) { __asm__ volatile("tilerelease"); }
#define ZERO(c) __asm__ volatile("tilezero %%tmm" #c ::)
#define LOAD(c, from)                                                                              \
    __asm__ volatile("tileloadd (%0,%1), %%tmm" #c :: "r"(from), "r"(64L) : "memory")
#define STORE(c, to)                                                                               \
    __asm__ volatile("tilestored %%tmm" #c ", (%0,%1)" :: "r"(to), "r"(64L) : "memory")
#define ADD(instruction, c, a, b)                                                                  \
    __asm__ volatile(#instruction " %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

// ---- W and x as tiles ---------------------------------------------------------------------------

// R, nearly as many rows of x in each tile (bfloat16: twice as many, in two tiles, if more than one
// is needed); 0 where T rows by W are not multiplied in tiles.
static long tile_rows(const Weight *w, long T) {
    int in_tiles = w->kind == BF16 || (T > FEW_WHOLE && (w->kind == I8 || w->kind == I4));
    long R = parts(T, parts(T, TILE_ROWS)), twice = w->kind == BF16 && T > TILE_ROWS;
    return has_tiles && in_tiles ? R << twice : 0;
}

// Blocks of a stretch of n columns.
static long blocks_of(const Weight *w, long n) { return parts(n, w->kind == BF16 ? 32 : 64); }

// Bytes that a row of x has in A.
static long row_bytes(const Weight *w) {
    long stretch = least(w->group, STRETCH);
    return parts(w->K, stretch) * blocks_of(w, stretch) * 2 * 64;
}

// Units of a panel as rows of B; what is left of `blocks` is 0. INT4 is in byte_of's order.
static void panel_to_tiles(long kind, const char *w, long units, char *to, long blocks) {
    char *end = to + blocks * TILE_BYTES;
    if (kind == I4)
        for (long k = 0; k < units; k++, w += 64, to += 128) for (int v = 0; v < VECS; v++) {
            ints eight = *(const ints *)(w + v * LANES * 4);
            *(ints *)(to + v * LANES * 4) = eight & 0x0F0F0F0F;
            *(ints *)(to + 64 + v * LANES * 4) = eight >> 4 & 0x0F0F0F0F;
        }
    else if (kind == I8)                            // two units of two columns are a row
        for (long k = 0; k < units; k += 2, w += 64, to += 64) for (int v = 0; v < VECS; v++) {
            const uint16_t *two = (const uint16_t *)w + v * LANES;
            const uint16_t *next = two + (k + 1 < units ? WIDE : 0);        // A has 0 there
            *(ints *)(to + v * LANES * 4) = widen_u16(two) | widen_u16(next) << 16;
        }
    else {
        memcpy(to, w, units * 64);
        to += units * 64;
    }
    memset(to, 0, end - to);
}

// The nearest bfloat16 of each lane, in its upper half: `to_bf16`.
INLINE ints nearest_bf16(vec x) {
    ints bits = (ints)x, is_nan = x != x;
    bits += 0x7FFF + (bits >> 16 & 1);
    return ((bits & ~is_nan) | (is_nan & 0x7FC00000)) & -0x10000;
}
INLINE void store_bf16(char *to, ints x) {
    *(ushorts *)to = __builtin_convertvector(x >> 16, ushorts);
}

// A row of x, [K], in A: `apart` bytes from high to low, and on to the next block.
static void row_to_bf16(const float *x, long K, char *high, long apart) {
    for (long k = 0; k < parts(K, 32) * 32; k += LANES) {
        char *to = high + k / 32 * 2 * apart + k % 32 * 2;
        vec all = load_some(x + k, K - k, 0);
        ints nearest = nearest_bf16(all);
        store_bf16(to, nearest);
        store_bf16(to + apart, nearest_bf16(all - (vec)nearest));
    }
}

// The same in bytes, with its whole numbers' scales; `next` bytes from a stretch to the next one.
static void row_to_bytes(const Weight *w, const float *x, Whole *whole, char *to, long apart,
                         long next) {
    long stretch = least(w->group, STRETCH);
    for (long k = 0; k < w->K; k += stretch, whole++, to += next) {
        long n = least(w->K - k, stretch);
        int16_t q[STRETCH] = {0}, in_order[STRETCH];
        *whole = to_whole(x + k, q, n);
        for (long c = 0; c < STRETCH; c += 8) UNROLL for (int i = 0; i < 8; i++)
            in_order[c + byte_of(w->kind, i)] = q[c + i];
        for (long c = 0; c < blocks_of(w, n) * 64; c += 64) {
            int8_t *high = (int8_t *)to + c / 64 * 2 * apart, *low = high + apart;
            for (int i = 0; i < 64; i++) high[i] = in_order[c + i] >> 8;
            for (int i = 0; i < 64; i++) low[i] = in_order[c + i];
        }
    }
}
static void row_to_tiles(const Weight *w, const float *x, Whole *whole, char *to, long apart,
                         long next) {
    if (w->kind == BF16) row_to_bf16(x, w->K, to, apart);
    else row_to_bytes(w, x, whole, to, apart, next);
}

// ---- Whole numbers ------------------------------------------------------------------------------

// A tile's rows by P panels over a stretch: sums of high and of low with one panel, then another.
// Of `a`, units are blocks; row: bytes from high to low.
INLINE void multiply_whole(const Stretch *a, const int P) {
    const char *x = a->x, *w = a->w;
    ZERO(0); ZERO(1); ZERO(2); ZERO(3);
    for (long i = 0; i < a->units; i++, x += 2 * a->row, w += TILE_BYTES) {
        LOAD(4, x); LOAD(5, x + a->row); LOAD(6, w);
        ADD(tdpbssd, 0, 4, 6); ADD(tdpbusd, 1, 5, 6);
        if (P == 1) continue;
        LOAD(7, w + a->panel);
        ADD(tdpbssd, 2, 4, 7); ADD(tdpbusd, 3, 5, 7);
    }
}

// As the end of BLOCK in blocks.c, of T rows.
INLINE void add_whole_sums(const Stretch *a, const ints (*sums)[TILE_ROWS][VECS], long T,
                           const int P) {
    UNROLL for (int p = 0; p < P; p++) UNROLL for (int v = 0; v < VECS; v++) {
        long at = p * a->next + v * LANES;
        vec scale = scales(a, at);
        for (long t = 0; t < T; t++) {
            ints both = (sums[2 * p][t][v] << 8) + sums[2 * p + 1][t][v];
            vec *y = (vec *)(a->y + t * a->N + p * WIDE + v * LANES);
            vec all = total_ints(a, both, a->whole + t * a->stretches, at);
            *y = fused(all, scale, a->first ? (vec){0} : *y);
        }
    }
}

// T rows of x. While the CPU multiplies a tile of them, it adds the sums of the tile before to y.
INLINE void tiled_whole(Stretch a, const Rows *x, long T, const int P) {
    ints sums[4][TILE_ROWS][VECS] __attribute__((aligned(64)));
    for (long t = 0, before = 0; ; t += before) {
        if (t < T) multiply_whole(&a, P);
        if (t > 0) {
            add_whole_sums(&a, sums, before, P);
            a.y += before * a.N, a.whole += before * a.stretches;
        }
        if (t >= T) return;
        before = least(T - t, x->tile_rows);
        STORE(0, sums[0]); STORE(1, sums[1]); STORE(2, sums[2]); STORE(3, sums[3]);
        a.x += x->tile;
    }
}

// n numbers of each of T rows, which are so far apart.
static void copy_rows(const float *from, long from_row, float *to, long to_row, long T, long n) {
    for (long t = 0; t < T; t++) memcpy(to + t * to_row, from + t * from_row, n * sizeof *to);
}

// Lines of y are far apart, so the caches hold few of them: what a pair of panels adds up lies side
// by side, in `sums`, meanwhile.
static void some_whole(const Weight *w, Rows x, float *y, long T, long N, long first, long last) {
    long stretch = least(w->group, STRETCH), near = 2 * LONG / stretch * stretch;
    long unit = WIDE * BYTES[w->kind], columns = COLUMNS[w->kind];
    char *room = allocate(2 * MOST_BLOCKS * TILE_BYTES);
    float *sums = allocate(T * 2 * WIDE * sizeof *sums);
    begin_tiles(x.tile_rows);
    for (long start = 0; start < x.K; start += near) for (long p = first, P; p < last; p += P) {
        long end = least(x.K, start + near), bytes = parts(end - start, columns) * unit;
        P = least(last - p, 2);
        Stretch a = stretch_at(w, p, start, stretch);
        const char *panels = a.w;
        long far = a.panel, ahead = p + P < last ? P * far : (first - p) * far + bytes;
        a.w = room, a.row = x.tile_rows * 64, a.stretches = x.stretches, a.N = P * WIDE;
        a.y = sums;
        if (start > 0) copy_rows(y + p * WIDE, N, sums, a.N, T, a.N);
        for (long k = start, i = start / stretch; k < end; k += stretch, i++) {
            long n = least(end - k, stretch), units = parts(n, columns);
            a.units = blocks_of(w, n), a.panel = a.units * TILE_BYTES;
            for (long c = 0; c < P; c++) {
                const char *panel = panels + c * far;
                for (long b = 0; b < units * unit; b += 64)
                    __builtin_prefetch(panel + ahead + b, 0, 2);
                panel_to_tiles(w->kind, panel, units, room + c * a.panel, a.units);
            }
            panels += units * unit;
            for (long t = (k - start) / stretch; t < T; t += parts(end - start, stretch))
                for (long c = 0; c < P; c++) __builtin_prefetch(y + t * N + (p + c) * WIDE, 1);
            see_group(&a, w, p, k);
            a.x = x.x + i * x.next, a.whole = x.whole + i, a.first = k == 0;
            if (P > 1) tiled_whole(a, &x, T, 2);
            else tiled_whole(a, &x, T, 1);
        }
        copy_rows(sums, a.N, y + p * WIDE, N, T, a.N);
    }
    end_tiles();
    free(room), free(sums);
}

// ---- bfloat16 -----------------------------------------------------------------------------------

// T rows of x by P panels over a stretch. The rows are in two tiles, R in each, or in one; each has
// P sums, of high and of low. Of `a`, units are blocks; row: bytes from high to low.
static void tiled_real(const Stretch *a, long T, long R, int P) {
    vec sums[4][TILE_ROWS][VECS] __attribute__((aligned(64)));
    const char *x = a->x, *w = a->w, *soon = a->soon;
    ZERO(0); ZERO(1); ZERO(2); ZERO(3);
    for (long i = 0; i < a->units; i++, w += TILE_BYTES, soon += a->pace) {
        for (int p = 0; p < P; p++) {
            for (long b = 0; b < a->pace; b += 64) __builtin_prefetch(soon + p * a->far + b, 0, 2);
            for (long t = i; t < T; t += a->units)
                __builtin_prefetch(a->y + t * a->N + p * WIDE, 1);
        }
        LOAD(6, w);
        if (P > 1) LOAD(7, w + a->panel);
        for (int half = 0; half < 2; half++, x += a->row) {                     // high, then low
            LOAD(4, x);
            ADD(tdpbf16ps, 0, 4, 6);
            if (P > 1) ADD(tdpbf16ps, 1, 4, 7);
            if (T <= R) continue;
            LOAD(5, x + R * 64);
            ADD(tdpbf16ps, 2, 5, 6);
            if (P > 1) ADD(tdpbf16ps, 3, 5, 7);
        }
    }
    STORE(0, sums[0]); STORE(1, sums[1]); STORE(2, sums[2]); STORE(3, sums[3]);
    for (long t = 0; t < T; t++) for (int p = 0; p < P; p++) for (int v = 0; v < VECS; v++) {
        int second = t >= R;                                                    // tile
        vec *y = (vec *)(a->y + t * a->N + p * WIDE + v * LANES);
        vec sum = sums[2 * second + p][t - second * R][v];
        *y = a->first ? sum : *y + sum;
    }
}

// The same to the bit in vectors, of T rows of x, up to FEW_REAL: of each block, high and low have
// a sum of even columns and one of odd columns, of products without rounding. Nothing is fetched
// ahead: CPUs do that for a few streams.
INLINE void few_real(const Stretch *a, const int T, const int P) {
    vec sums[FEW_REAL][4][VECS] = {0};
    const char *x = a->x, *w = a->w;
    for (long i = 0; i < a->units; i++, x += 2 * a->row) {
        vec s[2 * FEW_REAL][2][4][VECS] = {0};                                  // high, then low
        for (long k = 0; k < 64; k += 4, w += 64) {
            ints two[2 * FEW_REAL];                                             // columns of x
            UNROLL for (int t = 0; t < 2 * T; t++)
                two[t] = (ints){0} + *(const int32_t *)(x + t * 64 + k);
            UNROLL for (int p = 0; p < P; p++) UNROLL for (int v = 0; v < VECS; v++) {
                const char *own = w + p * a->panel + v * LANES * 4;
                vec even = step_bf16(own, 0), odd = step_bf16(own, 1);
                UNROLL for (int t = 0; t < 2 * T; t++) {
                    s[t][0][p][v] = fused((vec)(two[t] << 16), even, s[t][0][p][v]);
                    s[t][1][p][v] = fused((vec)(two[t] & -0x10000), odd, s[t][1][p][v]);
                }
            }
        }
        UNROLL for (int t = 0; t < 2 * T; t++)
            UNROLL for (int p = 0; p < P; p++) UNROLL for (int v = 0; v < VECS; v++)
                sums[t % T][p][v] += s[t][0][p][v] + s[t][1][p][v];
    }
    for (int t = 0; t < T; t++) for (int p = 0; p < P; p++) for (int v = 0; v < VECS; v++) {
        vec *y = (vec *)(a->y + t * a->N + p * WIDE + v * LANES);
        *y = a->first ? sums[t][p][v] : *y + sums[t][p][v];
    }
}

// Columns of the next sum, of those that are left: whole blocks, then what is less than one.
static long next_sum(long left) { return left < 32 ? left : least(LONG, left / 32 * 32); }

// T rows of x by P panels over a stretch: in vectors, or in tiles of R rows.
static void multiply_real(Stretch a, const Rows *x, long T, long R, int P) {
    if (R == 1 && P > 1) few_real(&a, 1, 4);
    else if (R == 1) few_real(&a, 1, 1);
    else if (R == 2 && P > 1) few_real(&a, 2, 2);
    else if (R == 2) few_real(&a, 2, 1);
    else for (long t = 0; t < T; t += x->tile_rows) {
        tiled_real(&a, least(x->tile_rows, T - t), R, P);
        a.x += x->tile, a.y += x->tile_rows * a.N, a.soon += a.units * a.pace;
    }
}

static void some_real(const Weight *w, Rows x, float *y, long T, long N, long first, long last) {
    long all = x.tile_rows, R = all > TILE_ROWS ? all / 2 : all, few = R <= FEW_REAL;
    long wide = few ? 4 / R : 2;                    // panels, so that sums fit the registers
    char *room = allocate(4 * TILE_BYTES);
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);                    // as in tiles, what is subnormal is 0
    if (!few) begin_tiles(R);
    for (long k = 0, n; k < x.K; k += n) {
        n = next_sum(x.K - k);
        for (long p = first, P; p < last; p += P) {
            P = last - p < wide ? 1 : wide;
            Stretch a = stretch_at(w, p, k, n);
            a.soon = a.w + (p + P < last ? P * a.panel : (first - p) * a.panel + n * WIDE * 2);
            a.far = a.panel, a.pace = parts(TILE_BYTES / 64, parts(T, all)) * 64;
            a.x = x.x + k / 32 * 128 * all, a.y = y + p * WIDE;
            a.row = 64 * all, a.N = N, a.units = parts(n, 32), a.first = k == 0;
            for (long c = 0; n < 32 && c < P; c++)
                panel_to_tiles(BF16, a.w + c * a.panel, parts(n, 2), room + c * TILE_BYTES, 1);
            if (n < 32) a.w = room, a.panel = TILE_BYTES;
            multiply_real(a, &x, T, R, P);
        }
    }
    if (!few) end_tiles();
    _mm_setcsr(before);
    free(room);
}

// As some_panels in products.c.
static void some_tiles(const Weight *w, Rows x, float *y, long T, long N, long first, long last) {
    (w->kind == BF16 ? some_real : some_whole)(w, x, y, T, N, first, last);
}

#else
long ask_for_tiles() { return 0; }
static long tile_rows(const Weight *w, long T) { return 0; }
static long row_bytes(const Weight *w) { return 0; }
static void row_to_tiles(const Weight *w, const float *x, Whole *whole, char *to, long apart,
                         long next) {}
static void some_tiles(const Weight *w, Rows x, float *y, long T, long N, long first, long last) {}
#endif
