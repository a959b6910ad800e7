/* Copy and checksum (CRC-32C) many ranges of memory in one call. Python calls it without the GIL.
   At the end, a handler of signals that has to know their sender.

   Theory. An ordinary store first fetches the cache line that it writes to, so a copy moves three
   bytes over the bus for each byte copied; with non-temporal stores it moves two. The C library
   uses them only above a size that on servers is larger than any block here.

   A copy waits for memory, so the CRC of the bytes in its registers costs little. That CRC is right
   even if another thread writes to the source meanwhile. Carry-less multiplication moves 16 bytes
   of the polynomial ahead by any distance in two products, which are added to the bytes there
   (V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction",
   Intel, 2009). Eight lanes of 16 bytes are folded in parallel, then into one, and the processor's
   CRC instruction reduces that.

   The library detects the processor's features when it is loaded. */

#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#ifndef SOURCE_HASH
#define SOURCE_HASH ""
#endif
#define EXPORT __attribute__((visibility("default")))

EXPORT const char source_hash[] = SOURCE_HASH;

/* Returns the CRC-32C of n bytes, and copies them unless `to` is NULL. */
typedef uint32_t Sum(uint8_t *to, const uint8_t *from, size_t n);

static uint32_t table[8][256];

static void make_table(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (0x82f63b78 & -(crc & 1));
        table[0][i] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (int i = 0; i < 256; i++)
            table[k][i] = table[k - 1][i] >> 8 ^ table[0][table[k - 1][i] & 255];
}

static uint32_t sum_portable(uint8_t *to, const uint8_t *from, size_t n) {
    uint32_t crc = ~0u;
    for (; n >= 8; n -= 8, from += 8) {
        uint8_t word[8];
        memcpy(word, from, 8);
        if (to) memcpy(to, word, 8), to += 8;
        for (int k = 0; k < 4; k++) word[k] ^= (uint8_t)(crc >> 8 * k);
        crc = 0;
        for (int k = 0; k < 8; k++) crc ^= table[7 - k][word[k]];
    }
    for (; n; n--) {
        uint8_t byte = *from++;
        if (to) *to++ = byte;
        crc = crc >> 8 ^ table[0][(crc ^ byte) & 255];
    }
    return ~crc;
}

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#ifdef __clang__
#define FEATURES "sse4.2,pclmul,crc32" /* sse4.2 includes crc32 in GCC */
#else
#define FEATURES "sse4.2,pclmul"
#endif
#define CRC __attribute__((target(FEATURES)))
#define CRC_OF_WORD(crc, word) (uint32_t)_mm_crc32_u64(crc, word)
#define CRC_OF_BYTE(crc, byte) _mm_crc32_u8(crc, byte)
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <sys/auxv.h>
#define CRC __attribute__((target("+crc")))
#define CRC_OF_WORD(crc, word) __crc32cd(crc, word)
#define CRC_OF_BYTE(crc, byte) __crc32cb(crc, byte)
#endif

#ifdef CRC
CRC static inline uint32_t by_words(uint32_t crc, uint8_t *to, const uint8_t *from, size_t n) {
    for (; n >= 8; n -= 8, from += 8) {
        uint64_t word;
        memcpy(&word, from, 8);
        if (to) memcpy(to, &word, 8), to += 8;
        crc = CRC_OF_WORD(crc, word);
    }
    for (; n; n--) {
        uint8_t byte = *from++;
        if (to) *to++ = byte;
        crc = CRC_OF_BYTE(crc, byte);
    }
    return crc;
}
#endif

#if defined(__x86_64__)
/* Powers of x divided by the polynomial, their highest coefficient in the lowest bit. */
#define POWERS(low, high) _mm_set_epi64x(0x##high##00000000, 0x##low##00000000)
#define BY_128_BYTES POWERS(6577b245, 7417153f) /* x^1087 and x^1023 */
#define BY_16_BYTES POWERS(3743f7bd, 3171d430)  /* x^191 and x^127 */
#define BACK POWERS(ef027556, 0) /* x^-961 undoes the move of the first lane by 128 bytes */

CRC static inline __m128i moved(__m128i lane, __m128i by) {
    return _mm_xor_si128(_mm_clmulepi64_si128(lane, by, 0x00), _mm_clmulepi64_si128(lane, by, 0x11));
}

CRC static inline __m128i begun(uint32_t crc) {
    return _mm_clmulepi64_si128(_mm_cvtsi32_si128((int)crc), BACK, 0x00);
}

CRC static inline uint32_t reduced(const __m128i lanes[8]) {
    __m128i all = lanes[0];
    for (int i = 1; i < 8; i++) all = _mm_xor_si128(moved(all, BY_16_BYTES), lanes[i]);
    uint64_t crc = _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(all));
    return (uint32_t)_mm_crc32_u64(crc, (uint64_t)_mm_extract_epi64(all, 1));
}

/* sum_sse and sum_avx differ in the width of their registers. All loads of an iteration come before
   its stores: alternating loads and stores take half as long again. */
CRC static uint32_t sum_sse(uint8_t *to, const uint8_t *from, size_t n) {
    uint32_t crc = ~0u;
    if (n >= 256) {
        size_t head = to ? -(uintptr_t)to & 15 : 0;
        crc = by_words(crc, to, from, head);
        if (to) to += head;
        __m128i lanes[8] = {begun(crc)};
        for (from += head, n -= head; n >= 128; n -= 128)
            for (int i = 0; i < 8; i += 4, from += 64) {
                __m128i data[4];
                for (int k = 0; k < 4; k++) data[k] = _mm_loadu_si128((const __m128i *)from + k);
                if (to) {
                    _mm_prefetch((const char *)from + 1024, _MM_HINT_NTA);
                    for (int k = 0; k < 4; k++) _mm_stream_si128((__m128i *)to + k, data[k]);
                    to += 64;
                }
                for (int k = 0; k < 4; k++)
                    lanes[i + k] = _mm_xor_si128(moved(lanes[i + k], BY_128_BYTES), data[k]);
            }
        crc = reduced(lanes);
    }
    return ~by_words(crc, to, from, n);
}

#define WIDE __attribute__((target(FEATURES ",avx2,vpclmulqdq")))
WIDE static uint32_t sum_avx(uint8_t *to, const uint8_t *from, size_t n) {
    uint32_t crc = ~0u;
    if (n >= 256) {
        size_t head = to ? -(uintptr_t)to & 31 : 0;
        crc = by_words(crc, to, from, head);
        if (to) to += head;
        __m256i by = _mm256_broadcastsi128_si256(BY_128_BYTES), data[4];
        __m256i lanes[4] = {_mm256_set_m128i(_mm_setzero_si128(), begun(crc))};
        for (from += head, n -= head; n >= 128; n -= 128, from += 128) {
            for (int k = 0; k < 4; k++) data[k] = _mm256_loadu_si256((const __m256i *)from + k);
            if (to) {
                _mm_prefetch((const char *)from + 1024, _MM_HINT_NTA);
                _mm_prefetch((const char *)from + 1088, _MM_HINT_NTA);
                for (int k = 0; k < 4; k++) _mm256_stream_si256((__m256i *)to + k, data[k]);
                to += 128;
            }
            for (int k = 0; k < 4; k++) {
                __m256i low = _mm256_clmulepi64_epi128(lanes[k], by, 0x00);
                __m256i high = _mm256_clmulepi64_epi128(lanes[k], by, 0x11);
                lanes[k] = _mm256_xor_si256(_mm256_xor_si256(low, high), data[k]);
            }
        }
        __m128i halves[8];
        for (int k = 0; k < 4; k++) _mm256_storeu_si256((__m256i *)halves + k, lanes[k]);
        crc = reduced(halves);
    }
    return ~by_words(crc, to, from, n);
}

static void copy(uint8_t *to, const uint8_t *from, size_t n) {
    if (n >= 64) {
        size_t head = -(uintptr_t)to & 63;
        memcpy(to, from, head);
        to += head, from += head, n -= head;
        for (; n >= 64; n -= 64, from += 64, to += 64) {
            __m128i data[4];
            _mm_prefetch((const char *)from + 1024, _MM_HINT_NTA);
            for (int k = 0; k < 4; k++) data[k] = _mm_loadu_si128((const __m128i *)from + k);
            for (int k = 0; k < 4; k++) _mm_stream_si128((__m128i *)to + k, data[k]);
        }
    }
    memcpy(to, from, n);
}

/* Make streamed stores visible to other processors before later stores. */
static void settle(void) { _mm_sfence(); }

/* Asks the processor itself: __builtin_cpu_supports finds no feature where zig compiles. */
static Sum *best_sum(void) {
    unsigned a, b, c, d, enabled, high;
    unsigned needed = bit_SSE4_2 | bit_PCLMUL;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & needed) != needed) return sum_portable;
    if (!(c & bit_OSXSAVE)) return sum_sse;
    __asm__ volatile("xgetbv" : "=a"(enabled), "=d"(high) : "c"(0)); /* stays behind the check */
    int saved = (enabled & 6) == 6; /* the system keeps the wide registers of a thread */
    int wide = saved && __get_cpuid_count(7, 0, &a, &b, &c, &d) && b & bit_AVX2;
    return wide && c & bit_VPCLMULQDQ ? sum_avx : sum_sse;
}
#else
static void copy(uint8_t *to, const uint8_t *from, size_t n) { memcpy(to, from, n); }
static void settle(void) {}

#ifdef CRC
CRC static uint32_t sum_arm(uint8_t *to, const uint8_t *from, size_t n) {
    return ~by_words(~0u, to, from, n);
}
static Sum *best_sum(void) { return getauxval(AT_HWCAP) & HWCAP_CRC32 ? sum_arm : sum_portable; }
#else
static Sum *best_sum(void) { return sum_portable; }
#endif
#endif

static Sum *sum;

__attribute__((constructor)) static void load(void) {
    make_table();
    sum = best_sum();
}

EXPORT void copy_each(uint8_t **to, uint8_t **from, const size_t *sizes, size_t count) {
    for (size_t i = 0; i < count; i++) copy(to[i], from[i], sizes[i]);
    settle();
}

EXPORT void crc32c_each(uint8_t **from, const size_t *sizes, uint32_t *sums, size_t count) {
    for (size_t i = 0; i < count; i++) sums[i] = sum(NULL, from[i], sizes[i]);
}

EXPORT void copy_crc32c_each(
    uint8_t **to, uint8_t **from, const size_t *sizes, uint32_t *sums, size_t count
) {
    for (size_t i = 0; i < count; i++) sums[i] = sum(to[i], from[i], sizes[i]);
    settle();
}

/* Copies ranges up to the first whose CRC is not the given one, and returns its number. A range
   without a target is only verified. */
EXPORT size_t verify_copy_each(
    uint8_t **to, uint8_t **from, const size_t *sizes, const uint32_t *sums, size_t count
) {
    size_t i = 0;
    for (; i < count && sum(NULL, from[i], sizes[i]) == sums[i]; i++)
        if (to[i]) copy(to[i], from[i], sizes[i]);
    settle();
    return i;
}

/* Counts of NaN: elements whose bits but the sign are more than those of infinity, or of the largest
   number where a dtype has no infinity. Without the sign, signed comparisons are enough, which SSE2
   has for up to 32 bits, and AVX2 for 64. A sum of one stretch fits the element's type, so it needs
   no wider one. */

#define COUNT_NAN_BY(feature, name, bits, mask, most, stretch)                                   \
    feature static size_t name##most(const uint8_t *from, size_t n) {                            \
        typedef int##bits##_t Element __attribute__((aligned(1), may_alias));                    \
        const Element *at = (const Element *)from;                                               \
        size_t found = 0;                                                                        \
        for (n /= sizeof(Element); n;) {                                                         \
            size_t count = n < stretch ? n : stretch;                                            \
            int##bits##_t some = 0;                                                              \
            for (size_t i = 0; i < count; i++) some += (int##bits##_t)((at[i] & mask) > most);   \
            found += (size_t)some, at += count, n -= count;                                      \
        }                                                                                        \
        return found;                                                                            \
    }
#if defined(__x86_64__)
#define WIDER __attribute__((target("avx2")))
#define COUNT_NAN(...)                                                                           \
    COUNT_NAN_BY(, count_nan_, __VA_ARGS__) COUNT_NAN_BY(WIDER, wider_, __VA_ARGS__)
#else
#define COUNT_NAN(...) COUNT_NAN_BY(, count_nan_, __VA_ARGS__)
#endif
COUNT_NAN(64, 0x7fffffffffffffff, 0x7ff0000000000000, 4096)
COUNT_NAN(32, 0x7fffffff, 0x7f800000, 4096)
COUNT_NAN(16, 0x7fff, 0x7f80, 4096)
COUNT_NAN(16, 0x7fff, 0x7c00, 4096)
COUNT_NAN(8, 0x7f, 0x7e, 96)
COUNT_NAN(8, 0x7f, 0x7c, 96)

/* By the numbers of native.py: F64, F32, BF16, F16, F8_E4M3, F8_E5M2. */
#define ALL_DTYPES(name)                                                                         \
    {name##0x7ff0000000000000, name##0x7f800000, name##0x7f80, name##0x7c00, name##0x7e, name##0x7c}
typedef size_t Count(const uint8_t *from, size_t n);
static Count *const narrow_counts[] = ALL_DTYPES(count_nan_);

static Count *const *best_counts(void) {
#if defined(__x86_64__)
    static Count *const wide_counts[] = ALL_DTYPES(wider_);
    if (best_sum() == sum_avx) return wide_counts;
#endif
    return narrow_counts;
}

EXPORT void count_nan_each(
    uint8_t **from, const size_t *sizes, const size_t *dtypes, size_t *found, size_t count
) {
    Count *const *counts = best_counts();
    for (size_t i = 0; i < count; i++) found[i] = counts[dtypes[i]](from[i], sizes[i]);
}

/* Signals that only one process may end us by. A handler in Python is not told who sent a signal. */

static volatile pid_t may_end_us;

static void survive(int number, siginfo_t *info, void *context) {
    (void)context;
    if (number == SIGTERM && info->si_pid == may_end_us) _exit(0);
}

/* Ignores signals, except SIGTERM of one process, which ends this one. Programs that this process
   starts get the default actions, as exec resets a handler. Returns 0, or -1 and sets errno. */
EXPORT int survive_signals(const int *numbers, size_t count, pid_t sender) {
    struct sigaction action = {.sa_sigaction = survive, .sa_flags = SA_SIGINFO | SA_RESTART};
    sigemptyset(&action.sa_mask);
    may_end_us = sender;
    for (size_t i = 0; i < count; i++)
        if (sigaction(numbers[i], &action, NULL)) return -1;
    return 0;
}
