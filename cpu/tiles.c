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
//                   most 2^-17 |x|. Every product by such a W is made so, of one row too: so the
//                   bits of a row do not depend on how many rows a step has
//
//     A: [T / R, stretches, blocks, 2, R, 64 bytes]      blocks of a stretch; high and low
//     B: [panels, blocks, 16, WIDE, 4 bytes]             four bytes: columns that A has there, too
//
// What a block has beyond its stretch is 0 in A; so B may have any number there, but NaN.

// MOST_BLOCKS: of any stretch; bfloat16 has most. FEW_WHOLE: up to so many rows by whole numbers
// cost less in blocks.c, by counted instructions.
enum { TILE_ROWS = 16, TILE_BYTES = 1024, MOST_BLOCKS = STRETCH / 32, FEW_WHOLE = 4 };
long has_tiles;                                     // native.py asks before the first product

// ---- The instructions ---------------------------------------------------------------------------

// Tiles 0 to 3 are sums, of high and of low with one panel, then with another; 4 and 5 are high and
// low; 6 and 7 the panels.
#if defined __AMX_INT8__ && defined __AMX_BF16__ && defined __linux__
#include <sys/syscall.h>
#include <unistd.h>
// The system lends these registers to programs that ask: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA.
long ask_for_tiles() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }
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
#else
long ask_for_tiles() { return 0; }
static void begin_tiles(long R) {}
static void end_tiles(void) {}
#define ZERO(c)
#define LOAD(c, from)
#define STORE(c, to)
#define ADD(instruction, c, a, b)
#endif

// ---- W and x as tiles ---------------------------------------------------------------------------

// R, nearly as many rows of x in each tile; 0 where T rows by W are not multiplied in tiles.
static long tile_rows(const Weight *w, long T) {
    int in_tiles = w->kind == BF16 || (T > FEW_WHOLE && (w->kind == I8 || w->kind == I4));
    return has_tiles && in_tiles ? parts(T, parts(T, TILE_ROWS)) : 0;
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

// What `high` and `low` have of a block of a row of x.
static void split_whole(const int16_t *q, int8_t *restrict high, uint8_t *restrict low) {
    for (int c = 0; c < 64; c++) high[c] = q[c] >> 8, low[c] = q[c];
}
static void split_bf16(const float *x, uint16_t *restrict high, uint16_t *restrict low) {
    for (int c = 0; c < 32; c++) {
        high[c] = to_bf16(x[c]);
        low[c] = to_bf16(x[c] - one_bf16(high[c]));
    }
}

// A row of x, [K], in A: `apart` bytes from high to low, and on to the next block.
static void row_to_tiles(const Weight *w, const float *x, Whole *whole, char *to, long apart) {
    long stretch = least(w->group, STRETCH);
    for (long k = 0; k < w->K; k += stretch, whole++, to += blocks_of(w, stretch) * 2 * apart) {
        long n = least(w->K - k, stretch);
        float part[STRETCH] = {0};
        int16_t q[STRETCH] = {0}, in_order[STRETCH];
        if (w->kind == BF16) memcpy(part, x + k, n * sizeof *part);
        else *whole = to_whole(x + k, q, n);
        for (long c = 0; c < STRETCH; c += 8) for (long i = 0; i < 8; i++)
            in_order[c + byte_of(w->kind, i)] = q[c + i];
        for (long i = 0, blocks = blocks_of(w, n); i < blocks; i++) {
            char *high = to + i * 2 * apart, *low = high + apart;
            if (w->kind != BF16) split_whole(in_order + 64 * i, (int8_t *)high, (uint8_t *)low);
            else split_bf16(part + 32 * i, (uint16_t *)high, (uint16_t *)low);
        }
    }
}

// ---- The product --------------------------------------------------------------------------------

// T rows of x by P panels over a stretch, as BLOCK in blocks.c. Of `a`, units are blocks; row:
// bytes from high to low.
#define TILED(sort, numbers, add_high, add_low, both, total)                                       \
static void tiled_##sort(const Stretch *a, long T, int P) {                                        \
    numbers sums[4][TILE_ROWS][VECS] __attribute__((aligned(64)));                                 \
    const char *x = a->x, *w = a->w;                                                               \
    ZERO(0); ZERO(1); ZERO(2); ZERO(3);                                                            \
    for (long i = 0; i < a->units; i++, x += 2 * a->row, w += TILE_BYTES) {                        \
        LOAD(4, x); LOAD(5, x + a->row); LOAD(6, w);                                               \
        ADD(add_high, 0, 4, 6); ADD(add_low, 1, 5, 6);                                             \
        if (P == 1) continue;                                                                      \
        LOAD(7, w + a->panel);                                                                     \
        ADD(add_high, 2, 4, 7); ADD(add_low, 3, 5, 7);                                             \
    }                                                                                              \
    STORE(0, sums[0]); STORE(1, sums[1]); STORE(2, sums[2]); STORE(3, sums[3]);                    \
    for (int p = 0; p < P; p++) for (int v = 0; v < VECS; v++) {                                   \
        long at = p * a->next + v * LANES;                                                         \
        vec scale = scales(a, at);                                                                 \
        for (long t = 0; t < T; t++) {                                                             \
            numbers high = sums[2 * p][t][v], low = sums[2 * p + 1][t][v];                         \
            vec *y = (vec *)(a->y + t * a->N + p * WIDE + v * LANES);                              \
            vec all = total(a, both, a->whole + t * a->stretches, at);                             \
            *y = fused(all, scale, a->first ? (vec){0} : *y);                                      \
        }                                                                                          \
    }                                                                                              \
}
TILED(whole, ints, tdpbssd, tdpbusd, (high << 8) + low, total_ints)
TILED(real, vec, tdpbf16ps, tdpbf16ps, high + low, total_real)

// As some_panels in products.c.
static void some_tiles(const Weight *w, Rows x, float *y, long T, long N, long first, long last) {
    long stretch = least(w->group, STRETCH), most = blocks_of(w, stretch), apart = x.tile_rows * 64;
    long unit = WIDE * BYTES[w->kind], most_units = parts(stretch, COLUMNS[w->kind]);
    long end = parts(x.K, stretch) * most_units * unit;
    char *room = allocate(2 * MOST_BLOCKS * TILE_BYTES);
    begin_tiles(x.tile_rows);
    for (long p = first, P; p < last; p += P) {
        P = least(last - p, 2);
        Stretch a = stretch_at(w, p, 0, stretch);
        const char *panels = a.w;
        long far = a.panel, units = most_units;
        a.units = most, a.w = room, a.row = apart, a.stretches = x.stretches, a.N = N;
        for (long k = 0, i = 0; k < x.K; k += stretch, i++, panels += units * unit) {
            if (k + stretch > x.K)                                      // the last is a short one
                units = parts(x.K - k, COLUMNS[w->kind]), a.units = blocks_of(w, x.K - k);
            a.panel = a.units * TILE_BYTES;
            // To fetch: what is read later, of these panels or, beyond their end, of the next ones.
            long bytes = units * unit, ahead = AHEAD * most_units * unit;
            if (k + AHEAD * stretch >= x.K) ahead += P * far - end;
            for (long c = 0; c < P; c++) {
                const char *panel = panels + c * far;
                for (long b = 0; b < bytes; b += 64) __builtin_prefetch(panel + ahead + b, 0, 2);
                panel_to_tiles(w->kind, panel, units, room + c * a.panel, a.units);
            }
            see_group(&a, w, p, k);
            a.x = x.x + i * most * 2 * apart, a.whole = x.whole + i, a.y = y + p * WIDE;
            a.first = k == 0;
            for (long t = 0; t < T; t += x.tile_rows) {
                long rows = least(T - t, x.tile_rows);
                if (w->kind == BF16) tiled_real(&a, rows, P);
                else tiled_whole(&a, rows, P);
                a.x += x.tile_rows * x.row, a.y += rows * N, a.whole += rows * x.stretches;
            }
        }
    }
    end_tiles();
    free(room);
}
