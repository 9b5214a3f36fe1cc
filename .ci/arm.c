// Runs functions of cpu/*.c, which stand before this, for .ci/arm.py: in an emulator, as ARM does.
//
//     standard input: the table of NF4; then calls, each: the function's name, how many blocks of memory and arguments it has;
//         each block: its bytes, its number of pointers, what it holds, and its pointers: where in
//             the block each lies, and the number of the block that it points to
//         each argument: NUMBER, BLOCK or REAL, and its value
//     standard output: int8_columns; of each call what the function returns, and what the blocks
//         hold then
#include <stdio.h>

typedef struct { long size, pointers; char *memory; } Block;
typedef struct { long at, block; } Pointer;
typedef struct { long type; union { long i; double real; } value; } Argument;
enum { NUMBER, BLOCK, REAL, ARGUMENTS = 12 };

static void read_all(void *to, long size) { if (fread(to, 1, size, stdin) != size) exit(0); }

#define FUNCTION(name) { #name, (void *)name }
static const struct { const char *name; void *function; } FUNCTIONS[] = {
    FUNCTION(product), FUNCTION(rows), FUNCTION(add_norm), FUNCTION(swiglu),
    FUNCTION(attend), FUNCTION(layers), FUNCTION(pick_f32), FUNCTION(pick_f64),
    FUNCTION(verify_drafts), FUNCTION(probabilities_of_rows), FUNCTION(drafts), FUNCTION(head_rows),
    FUNCTION(head_drafts),
};

int main(void) {
    read_all(nf4, sizeof nf4);
    fwrite(&int8_columns, sizeof int8_columns, 1, stdout), fflush(stdout);
    for (;;) {
        char name[32];
        long counts[2], numbers[ARGUMENTS] = {0};
        float real = 0;
        read_all(name, sizeof name), read_all(counts, sizeof counts);
        Block blocks[counts[0]];
        for (long b = 0; b < counts[0]; b++) read_all(&blocks[b], 2 * sizeof(long)),
            blocks[b].memory = allocate(blocks[b].size);
        for (long b = 0; b < counts[0]; b++) {
            read_all(blocks[b].memory, blocks[b].size);
            for (long i = 0; i < blocks[b].pointers; i++) {
                Pointer p;
                read_all(&p, sizeof p);
                memcpy(blocks[b].memory + p.at, &blocks[p.block].memory, sizeof(char *));
            }
        }
        for (long i = 0, n = 0; i < counts[1]; i++) {
            Argument a;
            read_all(&a, sizeof a);
            if (a.type == REAL) real = a.value.real;
            else numbers[n++] = a.type == BLOCK ? (long)blocks[a.value.i].memory : a.value.i;
        }
        long i = 0, *x = numbers, result;
        while (strcmp(FUNCTIONS[i].name, name)) i++;
        // Whole numbers and floats have registers of their own, so their order does not matter.
        result = ((long (*)(long, long, long, long, long, long, long, long, long, long, long, long,
                            float))FUNCTIONS[i].function)(
            x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11], real);
        fwrite(&result, sizeof result, 1, stdout);
        for (long b = 0; b < counts[0]; b++) fwrite(blocks[b].memory, 1, blocks[b].size, stdout);
        for (long b = 0; b < counts[0]; b++) free(blocks[b].memory);
        fflush(stdout);
    }
}
