// Intel's tile instructions for CPUs without them: cpu/tiles.c runs as it is compiled for AMX.
// amx.py compiles this and preloads it.
//
// The CPU refuses each of them, the system sends SIGILL, and the handler does what the instruction
// would have done (Intel's Architecture Instruction Set Extensions, chapter on AMX). What the CPU
// refuses of them, as shapes that do not fit, ends the program; other illegal instructions do, too.
// The system call that asks for the registers succeeds.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <immintrin.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>

typedef struct { uint8_t palette, start, unused[14]; uint16_t bytes[16]; uint8_t rows[16]; } Shapes;
static _Thread_local Shapes shapes;
static _Thread_local union {
    int8_t i8[16][64];
    uint8_t u8[16][64];
    uint16_t bf16[16][32];
    int32_t i32[16][16];
    float f32[16][16];
} tile[8];

// General registers by their numbers in instructions.
static const int REGISTERS[] = { REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                 REG_R8, REG_R9, REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15 };

static float number(uint16_t x) {
    union { uint32_t i; float f; } u = { (uint32_t)x << 16 };
    return u.f;
}

// Whether the CPU takes these shapes.
static int are_valid(const Shapes *s) {
    int valid = s->palette == 1 && s->start == 0;
    for (int i = 0; i < 14; i++) valid &= s->unused[i] == 0;
    for (int c = 0; c < 8; c++)
        valid &= s->bytes[c] <= 64 && s->rows[c] <= 16 && !s->bytes[c] == !s->rows[c];
    for (int c = 8; c < 16; c++) valid &= !s->bytes[c] && !s->rows[c];      // there are eight tiles
    return valid;
}

// Whether the shapes of these tiles are those of c += a b. (Assemblers refuse a tile named twice.)
static int fit(int c, int a, int b) {
    return shapes.rows[c] && shapes.rows[c] == shapes.rows[a] && shapes.bytes[c] % 4 == 0
        && shapes.bytes[c] == shapes.bytes[b] && shapes.bytes[a] == 4 * shapes.rows[b];
}

// c += a b: bytes (`is_signed`: a's), or bfloat16, whose even and odd columns are summed apart, and
// which takes and gives what is subnormal as 0. (A handler of signals has a MXCSR of its own.)
static void multiply(int c, int a, int b, int is_bytes, int is_signed) {
    _mm_setcsr(0x9FC0);
    for (int m = 0; m < shapes.rows[c]; m++) for (int n = 0; n < shapes.bytes[c] / 4; n++) {
        float even = 0, odd = 0;
        for (int k = 0; k < shapes.bytes[a] / 4; k++) {
            if (is_bytes)
                for (int i = 4 * k; i < 4 * k + 4; i++)
                    tile[c].i32[m][n] += (is_signed ? tile[a].i8[m][i] : tile[a].u8[m][i])
                        * tile[b].i8[k][4 * n + i % 4];
            else {
                even = fmaf(number(tile[a].bf16[m][2 * k]), number(tile[b].bf16[k][2 * n]), even);
                odd = fmaf(number(tile[a].bf16[m][2 * k + 1]), number(tile[b].bf16[k][2 * n + 1]), odd);
            }
        }
        if (!is_bytes) tile[c].f32[m][n] += even + odd;
    }
}

// The instruction at `at` -> its length; 0: it is none of these.
static int run(const uint8_t *at, const greg_t *registers) {
    enum { NONE, X66, XF3, XF2 };                   // prefixes, as VEX has them
    if (at[0] != 0xC4 || (at[1] & 31) != 2 || at[2] & 0x84) return 0;
    int prefix = at[2] & 3, opcode = at[3], mode = at[4] >> 6, reg = at[4] >> 3 & 7, rm = at[4] & 7;
    int vvvv = ~at[2] >> 3 & 15, length = 5;
    if (mode == 3) {
        if (opcode == 0x49 && prefix == NONE && at[4] == 0xC0) memset(&shapes, 0, sizeof shapes);
        else if (opcode == 0x49 && prefix == XF2 && rm == 0 && shapes.rows[reg])
            memset(&tile[reg], 0, sizeof *tile);
        else if (vvvv > 7 || !fit(reg, rm, vvvv)) return 0;
        else if (opcode == 0x5E && (prefix == XF2 || prefix == X66))
            multiply(reg, rm, vvvv, 1, prefix == XF2);
        else if (opcode == 0x5C && prefix == XF3) multiply(reg, rm, vvvv, 0, 0);
        else return 0;
        return length;
    }
    int base = rm, index = -1, scale = 0;
    if (rm == 4) {
        base = at[5] & 7, index = (at[5] >> 3 & 7) | (~at[1] >> 6 & 1) << 3, scale = at[5] >> 6;
        length++;
    }
    base |= (~at[1] >> 5 & 1) << 3;
    if (mode == 0 && (base & 7) == 5) return 0;     // an address without a base: compilers have one
    char *address = (char *)registers[REGISTERS[base]];
    if (mode == 1) address += (int8_t)at[length++];
    if (mode == 2) {
        int32_t offset;
        memcpy(&offset, at + length, 4);
        address += offset, length += 4;
    }
    if (opcode == 0x49 && prefix == NONE && reg == 0) {
        memcpy(&shapes, address, sizeof shapes);
        if (!are_valid(&shapes)) return 0;
        memset(tile, 0, sizeof tile);
        return length;
    }
    if (opcode != 0x4B || rm != 4 || (prefix != XF2 && prefix != XF3) || !shapes.rows[reg])
        return 0;
    long stride = index == 4 ? 0 : registers[REGISTERS[index]] << scale;
    if (prefix == XF2) memset(&tile[reg], 0, sizeof *tile);
    for (int m = 0; m < shapes.rows[reg]; m++, address += stride) {
        if (prefix == XF2) memcpy(tile[reg].i8[m], address, shapes.bytes[reg]);
        else memcpy(address, tile[reg].i8[m], shapes.bytes[reg]);
    }
    return length;
}

static void refused(int number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    int length = run((const uint8_t *)registers[REG_RIP], registers);
    if (length) registers[REG_RIP] += length;
    else signal(number, SIG_DFL);                   // it comes again
}

static __attribute__((constructor)) void begin(void) {
    struct sigaction action = { .sa_sigaction = refused, .sa_flags = SA_SIGINFO | SA_NODEFER };
    sigaction(SIGILL, &action, 0);
}

long syscall(long number, ...) {
    va_list list;
    long a[6];
    va_start(list, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
    va_end(list);
    if (number == SYS_arch_prctl && a[0] == 0x1023) return 0;
    long (*next)(long, ...) = dlsym(RTLD_NEXT, "syscall");
    return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
