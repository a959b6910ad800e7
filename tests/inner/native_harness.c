/* Every kernel of _native.c against a sum bit by bit, for a run under sanitizers: each buffer ends
   with its last byte, so that a read or write behind it is found. */

#include "../../ckpipe/memory/_native.c"

#include <stdio.h>
#include <stdlib.h>

static uint32_t slow(const uint8_t *from, size_t n) {
    uint32_t crc = ~0u;
    for (size_t i = 0; i < n; i++) {
        crc ^= from[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (0x82f63b78 & -(crc & 1));
    }
    return ~crc;
}

static void expect(int right, const char *what, size_t n, size_t shift) {
    if (right) return;
    fprintf(stderr, "%s is wrong for %zu bytes at %zu\n", what, n, shift);
    exit(1);
}

static void try_sum(Sum *tried, const char *name, size_t n, size_t shift) {
    uint8_t *from = malloc(n + shift), *to = calloc(n + 70 - shift, 1);
    uint8_t *begin = from + shift, *target = to + 70 - shift;
    for (size_t i = 0; i < n; i++) begin[i] = (uint8_t)rand();
    uint32_t right = slow(begin, n);
    expect(tried(NULL, begin, n) == right, name, n, shift);
    expect(tried(target, begin, n) == right && !memcmp(target, begin, n), name, n, shift);

    sum = tried;
    uint32_t sums[2] = {0, right};
    memset(target, 0, n);
    copy_each(&target, &begin, &n, 1);
    expect(!memcmp(target, begin, n), "copy_each", n, shift);
    memset(target, 0, n);
    copy_crc32c_each(&target, &begin, &n, sums, 1);
    expect(sums[0] == right && !memcmp(target, begin, n), "copy_crc32c_each", n, shift);
    memset(target, 0, n);
    expect(verify_copy_each(&target, &begin, &n, sums, 1) == 1, "verify_copy_each", n, shift);
    expect(!memcmp(target, begin, n), "verify_copy_each", n, shift);
    uint8_t *none = NULL;
    expect(verify_copy_each(&none, &begin, &n, sums, 1) == 1, "verify_copy_each", n, shift);
    sums[0] ^= 1;
    expect(verify_copy_each(&target, &begin, &n, sums, 1) == 0, "verify_copy_each", n, shift);
    free(from);
    free(to);
}

static void try_all(Sum *tried, const char *name) {
    for (size_t n = 0; n < 520; n += n < 40 || n > 240 ? 1 : 13)
        for (size_t shift = 0; shift < 70; shift += 7) try_sum(tried, name, n, shift);
    for (size_t n = 100000; n < 100004; n++) try_sum(tried, name, n, n % 5);
    printf("%s\n", name);
}

static void try_counts(void) {
    const uint8_t most[][8] = { /* the greatest that is no NaN, with the sign */
        {0, 0, 0, 0, 0, 0, 0xf0, 0xff}, {0, 0, 0x80, 0xff}, {0x80, 0xff}, {0, 0xfc}, {0xfe}, {0xfc},
    };
    const size_t widths[] = {8, 4, 2, 2, 1, 1};
    for (size_t dtype = 0; dtype < 6; dtype++)
        for (size_t count = 0, width = widths[dtype]; count < 9000; count += count / 3 + 1)
            for (size_t shift = 0; shift < 9; shift++) {
                size_t n = count * width, nan = 0, found;
                uint8_t *from = malloc(n + shift), *begin = from + shift;
                for (size_t i = 0; i < count; i++) {
                    memcpy(begin + i * width, most[dtype], width);
                    if (i % 3 == 0) begin[i * width]++, nan++;
                }
                count_nan_each(&begin, &n, &dtype, &found, 1);
                expect(found == nan, "count_nan_each", n, shift);
                expect(narrow_counts[dtype](begin, n) == nan, "a narrow count", n, shift);
                free(from);
            }
}

int main(void) {
    try_counts();
    try_all(sum_portable, "sum_portable");
#if defined(__x86_64__)
    if (__builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul")) {
        try_all(sum_sse, "sum_sse");
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq"))
            try_all(sum_avx, "sum_avx");
    }
#elif defined(CRC)
    if (best_sum() == sum_arm) try_all(sum_arm, "sum_arm");
#endif
    return 0;
}
