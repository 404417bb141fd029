// y = x W^T + bias for a packed 2:4 weight W and some tokens, on the sparse tensor cores. W and x are of 16 bits, or both
// of 8 (e4m3) with a scale per row of W and one per token.
//
// A packed row is what mma.sp multiplies: its values in order are the rows of fragment A, its position words the
// metadata, x is B with a token per column. Nothing is decompressed; see sparse_linear_mma.py for the layouts.
//
// A block computes ROWS output features of TOKENS tokens. ROW_WARPS warps are a team: each of them has its share of the
// rows, all read the same part of x. The teams of a block, and the SPLITS blocks of a cluster, take the chunks of CHUNK
// channels in turn. A team copies its chunks into a ring of STAGES stages in shared memory, ahead of the products; its
// warps meet once per chunk. In the end the sums are added in a fixed order, over the teams and, through distributed
// shared memory, over the blocks of the cluster.
//
// The second kernel multiplies by wgmma, on Hopper alone: four warps at once, whose operands lie in shared memory. All
// warps of its blocks are one team, and the next chunk is copied while the products run. It also multiplies 8 bits.
//
// A kernel may begin while the one before it ends (a launch attribute). Until the writes of that one are visible, it
// only prefetches its first weights into the L2 cache, where later writes would update them.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef SPARSE_LINEAR_MMA_MODEL  // a test models what follows on a CPU
extern __shared__ uint4 dynamic_shared[];

__device__ __forceinline__ u32 shared_start() { return u32(__cvta_generic_to_shared(dynamic_shared)); }
__device__ __forceinline__ void copy_16(u32 to, const u8* from, bool there) {  // zeros if it is not there
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void copy_4(u32 to, const u8* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void bring_to_l2(const u8* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int GROUPS>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}
__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(row) : "memory");
}
__device__ __forceinline__ u32 load_word(u32 from) {
    u32 word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
    return word;
}
__device__ __forceinline__ void store_float(u32 to, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}
template <bool CLUSTER>
__device__ __forceinline__ void load_floats(float (&to)[4], u32 from, int block) {  // of a block of the cluster
#if __CUDA_ARCH__ >= 900
    if (CLUSTER) {
        u32 there;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(from), "r"(block));
        asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3]) : "r"(there) : "memory");
        return;
    }
#endif
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3]) : "r"(from) : "memory");
}
template <bool CLUSTER>
__device__ __forceinline__ void meet() {  // all threads of the cluster, or of the block
#if __CUDA_ARCH__ >= 900
    if (CLUSTER) {
        asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
        return;
    }
#endif
    __syncthreads();
}
template <int WARPS>
__device__ __forceinline__ void meet_team(int team) {  // all threads of some neighbouring warps
    if (WARPS == 1) __syncwarp();
    else asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(32 * WARPS) : "memory");
}
#define MULTIPLY(TYPE, SELECTOR)                                                                               \
    asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, "  \
        "{%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, " SELECTOR ";"                           \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                       \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata))
template <int BF16, int SELECTOR>
__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[4], u32 metadata) {
    if (BF16 && SELECTOR) MULTIPLY("bf16", "0x1");
    if (BF16 && !SELECTOR) MULTIPLY("bf16", "0x0");
    if (!BF16 && SELECTOR) MULTIPLY("f16", "0x1");
    if (!BF16 && !SELECTOR) MULTIPLY("f16", "0x0");
}
template <int BF16>
__device__ __forceinline__ float widen(u16 value) {
    float wide;
    if (BF16) return __uint_as_float(u32(value) << 16);
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value));
    return wide;
}
template <int BF16>
__device__ __forceinline__ u16 narrow(float value) {
    u16 narrowed;
    if (BF16) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrowed) : "f"(value));
    else asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrowed) : "f"(value));
    return narrowed;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // sm_90a: Hopper's own products, of four warps, whose operands lie in shared memory
#define SUMS_8 "%0, %1, %2, %3"
#define SUMS_16 SUMS_8 ", %4, %5, %6, %7"
#define SUMS_32 SUMS_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SUMS_64 SUMS_32 ", %16, %17, %18, %19, %20, %21, %22, %23, " \
    "%24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS_128 SUMS_64 ", %32, %33, %34, %35, %36, %37, %38, %39, " \
    "%40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, " \
    "%56, %57, %58, %59, %60, %61, %62, %63"
#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FOURS_8 FOUR(0)
#define FOURS_16 FOURS_8, FOUR(4)
#define FOURS_32 FOURS_16, FOUR(8), FOUR(12)
#define FOURS_64 FOURS_32, FOUR(16), FOUR(20), FOUR(24), FOUR(28)
#define FOURS_128 FOURS_64, FOUR(32), FOUR(36), FOUR(40), FOUR(44), FOUR(48), FOUR(52), FOUR(56), FOUR(60)
#define WIDE_PRODUCT(TOKENS, A, B, METADATA, SELECTOR_AT, ADDS_AT, SHAPE, NOT_TRANSPOSED)                              \
    asm volatile("{.reg .pred adds; setp.ne.u32 adds, %" #ADDS_AT ", 0; wgmma.mma_async.sp.sync.aligned.m64n" #TOKENS  \
                 SHAPE " {" SUMS_##TOKENS "}, %" #A ", %" #B ", %" #METADATA ", %" #SELECTOR_AT ", adds, 1, 1"         \
                 NOT_TRANSPOSED ";}"                                                                                   \
                 : FOURS_##TOKENS : "l"(a), "l"(b), "r"(metadata), "n"(SELECTOR), "n"(ADDS))
#define WIDE_PRODUCTS(TOKENS_, ...)                                                                                    \
    if (TOKENS == TOKENS_ && FP8) WIDE_PRODUCT(TOKENS_, __VA_ARGS__, "k64.f32.e4m3.e4m3", "");                         \
    if (TOKENS == TOKENS_ && !FP8 && BF16) WIDE_PRODUCT(TOKENS_, __VA_ARGS__, "k32.f32.bf16.bf16", ", 0, 0");          \
    if (TOKENS == TOKENS_ && !FP8 && !BF16) WIDE_PRODUCT(TOKENS_, __VA_ARGS__, "k32.f32.f16.f16", ", 0, 0")

// 64 rows of W by TOKENS tokens, summed over 64 bytes of channels, and added to d if it ADDS; a and b describe the
// operands in shared memory.
template <int FP8, int BF16, int TOKENS, int SELECTOR, int ADDS>
__device__ __forceinline__ void multiply_wide(float (&d)[TOKENS / 2], u64 a, u64 b, u32 metadata) {
    if constexpr (TOKENS == 8) { WIDE_PRODUCTS(8, 4, 5, 6, 7, 8); }
    if constexpr (TOKENS == 16) { WIDE_PRODUCTS(16, 8, 9, 10, 11, 12); }
    if constexpr (TOKENS == 32) { WIDE_PRODUCTS(32, 16, 17, 18, 19, 20); }
    if constexpr (TOKENS == 64) { WIDE_PRODUCTS(64, 32, 33, 34, 35, 36); }
    if constexpr (TOKENS == 128) { WIDE_PRODUCTS(128, 64, 65, 66, 67, 68); }
}
__device__ __forceinline__ void load_two_words(u32 (&to)[2], u32 from) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(from) : "memory");
}

__device__ __forceinline__ void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
#endif
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define CLUSTER_OF(SPLITS) __cluster_dims__(1, SPLITS, 1)
#else
#define CLUSTER_OF(SPLITS)
#endif

// What a team copies and multiplies at once: CHUNK channels of ROWS rows of W and of TOKENS rows of x. In shared memory
// the 16-byte units of a row change places, so that ldmatrix, which reads a unit of eight rows at once, finds them in
// different banks.
template <int ROWS, int ROW_WARPS, int TOKENS, int CHUNK>
struct Stage {
    static constexpr int VALUES_ROW = CHUNK, POSITIONS_ROW = CHUNK / 8, X_ROW = 2 * CHUNK;  // bytes
    static constexpr int POSITIONS = ROWS * VALUES_ROW, X = POSITIONS + ROWS * POSITIONS_ROW;
    static constexpr int BYTES = X + TOKENS * X_ROW;
    static constexpr int SHARE = ROWS / ROW_WARPS, TILES = SHARE / 16, COLUMNS = TOKENS / 8;

    template <int ROW_BYTES>
    static __device__ __forceinline__ int place_of(int row, int unit) {
        constexpr int LINE = ROW_BYTES < 128 ? ROW_BYTES : 128;
        return row * ROW_BYTES + (unit ^ row / (128 / LINE) % (LINE / 16)) * 16;
    }

    // Channels from in_features on count as zeros, with the positions of the row's first groups.
    static __device__ __forceinline__ void fill(u32 stage, const u8* x, const u8* values, const u8* positions, int c,
                                                int tokens, int in_features, int thread) {
        constexpr int UNITS = VALUES_ROW / 16, WORDS = POSITIONS_ROW / 4, X_UNITS = X_ROW / 16;
        constexpr int THREADS = 32 * ROW_WARPS;
        int row = thread / UNITS, unit = thread % UNITS;
        const bool there = c + 16 * unit < in_features;
        const u8* from = values + (long long)row * in_features + (there ? c + 16 * unit : 0);
#pragma unroll
        for (int i = 0; i < ROWS * UNITS / THREADS; ++i) {
            copy_16(stage + place_of<VALUES_ROW>(row + i * (THREADS / UNITS), unit), from, there);
            from += THREADS / UNITS * (long long)in_features;
        }
        row = thread / WORDS, unit = thread % WORDS;
        from = positions + (long long)row * (in_features / 8) + (c + 32 * unit < in_features ? c / 8 + 4 * unit : 0);
#pragma unroll
        for (int i = 0; i < (ROWS * WORDS + THREADS - 1) / THREADS; ++i) {
            if (ROWS * WORDS % THREADS == 0 || row < ROWS)
                copy_4(stage + POSITIONS + (row + i * (THREADS / WORDS)) * POSITIONS_ROW + 4 * unit, from);
            from += THREADS / WORDS * (long long)(in_features / 8);
        }
        row = thread / X_UNITS, unit = thread % X_UNITS;
        const bool in_x = c + 8 * unit < in_features;
        from = x + (long long)row * in_features * 2 + (in_x ? 2 * c + 16 * unit : 0);
#pragma unroll
        for (int i = 0; i < (TOKENS * X_UNITS + THREADS - 1) / THREADS; ++i) {
            const int token = row + i * (THREADS / X_UNITS);
            if (token < tokens) copy_16(stage + X + place_of<X_ROW>(token, unit), from, in_x);
            from += THREADS / X_UNITS * (long long)in_features * 2;
        }
    }

    // Prefetches into L2 the lines of W that `fill` reads; a line of positions holds those of several chunks.
    static __device__ __forceinline__ void expect(const u8* values, const u8* positions, int c, bool first,
                                                  int in_features, int thread) {
#pragma unroll
        for (int row = thread; row < ROWS; row += 32 * ROW_WARPS) {
            bring_to_l2(values + (long long)row * in_features + c);
            if (first) bring_to_l2(positions + (long long)row * (in_features / 8) + c / 8);
        }
    }

    // Adds 32 channels. Of a chunk of 64 or 128, product number STEP takes the words (16 channels each) STEP % 2 and
    // STEP % 2 + 2 of every four: their positions are the low or the high halves of the 32 bits that a thread loads. Of
    // a chunk of 32 it takes both words: the first of a pair of threads gives the low halves, the second the high ones.
    template <int BF16, int STEP>
    static __device__ __forceinline__ void step(float (&sums)[TILES][COLUMNS][4], const u32 (&pairs)[TILES][2],
                                                u32 stage, int first_row, int lane) {
        const int word = CHUNK == 32 ? lane / 16 : 4 * (STEP / 2) + STEP % 2 + lane / 16 * 2;
        const u32 halves = (CHUNK == 32 ? lane : STEP) % 2 ? 0x7632 : 0x5410;
        const u32 x = stage + X + place_of<X_ROW>(lane % 8, 2 * word + lane / 8 % 2);
        u32 b[COLUMNS][4];
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column) load_matrices(b[column], x + column * 8 * X_ROW);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            u32 a[4];
            load_matrices(a, stage + (first_row + tile * 16) * VALUES_ROW + place_of<VALUES_ROW>(lane % 16, word));
            const u32 metadata = __byte_perm(pairs[tile][0], pairs[tile][1], halves);
#pragma unroll
            for (int column = 0; column < COLUMNS; ++column)
                multiply<BF16, STEP / 2>(sums[tile][column], a, b[column], metadata);
        }
    }

    template <int BF16>
    static __device__ __forceinline__ void add(float (&sums)[TILES][COLUMNS][4], u32 stage, int first_row, int lane) {
        u32 pairs[TILES][2];
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = first_row + tile * 16 + half * 8 + lane / 4;
                pairs[tile][half] = load_word(stage + POSITIONS + row * POSITIONS_ROW + lane % (POSITIONS_ROW / 4) * 4);
            }
        step<BF16, 0>(sums, pairs, stage, first_row, lane);
        if constexpr (CHUNK >= 64) step<BF16, 1>(sums, pairs, stage, first_row, lane);
        if constexpr (CHUNK == 128) {
            step<BF16, 2>(sums, pairs, stage, first_row, lane);
            step<BF16, 3>(sums, pairs, stage, first_row, lane);
        }
    }
};

// Adds up the sums of TEAMS teams of SPLITS blocks, [TEAMS, TOKENS, ROWS + 4] floats in shared memory, in a fixed order.
// Four rows of a token at once; BATCH such fours are read before the first is written: reads of other blocks are slow.
// Sums of 8-bit products are multiplied by the scales of their row and token before the bias is added.
template <int FP8, int BF16, int ROWS, int TOKENS, int WARPS, int TEAMS, int SPLITS>
__device__ __forceinline__ void add_up(u32 shared, const u16* bias, const float* row_scales, const float* token_scales,
                                       u16* y, int block_row, int tokens, int out_features, int has_bias) {
    constexpr int SUMS_ROW = ROWS + 4;  // padded: the threads of a warp store to different banks
    meet<(SPLITS > 1)>();
    constexpr int FOURS = ROWS / 4, THREADS = 32 * WARPS * SPLITS, EACH = (TOKENS * FOURS + THREADS - 1) / THREADS;
    constexpr int BATCH = EACH < 4 ? EACH : 4;
    const int end = tokens * FOURS;
    int i = blockIdx.y * 32 * WARPS + threadIdx.x;
    if (i < end) do {
        float totals[BATCH][4] = {}, scales[BATCH][4];
        if (has_bias || FP8) {  // all loads at once, because each is slow
#pragma unroll
            for (int k = 0; k < BATCH; ++k)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int at = min(i + k * THREADS, end - 1), row = block_row + at % FOURS * 4 + j;
                    if (has_bias) totals[k][j] = widen<BF16>(bias[row]);
                    if (FP8) scales[k][j] = token_scales[at / FOURS] * row_scales[row];
                }
        }
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            const int at = min(i + k * THREADS, end - 1);
            float sums[4] = {};
#pragma unroll
            for (int part = 0; part < SPLITS * TEAMS; ++part) {
                const int line = part % TEAMS * TOKENS + at / FOURS;
                float some[4];
                load_floats<(SPLITS > 1)>(some, shared + 4 * (line * SUMS_ROW + at % FOURS * 4), part / TEAMS);
#pragma unroll
                for (int j = 0; j < 4; ++j) (FP8 ? sums[j] : totals[k][j]) += some[j];
            }
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (FP8) totals[k][j] += sums[j] * scales[k][j];
        }
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            const int at = i + k * THREADS, row = block_row + at % FOURS * 4;
            if (at >= end) break;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                y[(long long)(at / FOURS) * out_features + row + j] = narrow<BF16>(totals[k][j]);
        }
        i += BATCH * THREADS;
    } while (EACH > BATCH && i < end);
    if (SPLITS > 1) meet<(SPLITS > 1)>();  // no block ends while others read its sums
}

// x [tokens, in_features], values [out_features, in_features / 2], positions [out_features, in_features / 8 bytes] and
// y [tokens, out_features] are contiguous, the first three aligned to 16 bytes; bias [out_features] if has_bias.
// in_features is a multiple of 32, out_features at least ROWS; the last blocks overlap, and write the same bits twice.
// Grid: (ceil(out_features / ROWS), SPLITS, ceil(tokens / TOKENS)), blocks of 32 WARPS threads; ROWS / ROW_WARPS is a multiple of 16.
template <int BF16, int ROWS, int TOKENS, int CHUNK, int STAGES, int WARPS, int ROW_WARPS, int SPLITS>
__global__ void CLUSTER_OF(SPLITS) __launch_bounds__(32 * WARPS)
    sparse_linear_mma(const u8* x, const u8* values, const u8* positions, const u16* bias, u16* y, int tokens,
                      int out_features, int in_features, int has_bias) {
    using Chunk = Stage<ROWS, ROW_WARPS, TOKENS, CHUNK>;
    constexpr int TEAMS = WARPS / ROW_WARPS, STRIDE = CHUNK * TEAMS * SPLITS;
    constexpr int SUMS_ROW = ROWS + 4;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, team = warp / ROW_WARPS;
    const int member = threadIdx.x % (32 * ROW_WARPS), first_row = warp % ROW_WARPS * Chunk::SHARE;
    const int block_row = min(int(blockIdx.x) * ROWS, out_features - ROWS);
    const int first_token = int(blockIdx.z) * TOKENS;
    x += (long long)first_token * in_features * 2;
    y += (long long)first_token * out_features;
    tokens = min(tokens - first_token, TOKENS);
    values += (long long)block_row * in_features;
    positions += (long long)block_row * (in_features / 8);
    const u32 shared = shared_start(), ring = shared + team * STAGES * Chunk::BYTES;
    const int begin = (int(blockIdx.y) * TEAMS + team) * CHUNK;
    float sums[Chunk::TILES][Chunk::COLUMNS][4] = {};

#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        const int c = begin + stage * STRIDE;
        if (c < in_features) Chunk::expect(values, positions, c, stage == 0, in_features, member);
    }
    wait_for_kernel_before();
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        const int c = begin + stage * STRIDE;
        if (c < in_features)
            Chunk::fill(ring + stage * Chunk::BYTES, x, values, positions, c, tokens, in_features, member);
        commit_copies();
    }
    u32 current = 0, next = (STAGES - 1) * Chunk::BYTES;
#pragma unroll 1
    for (int c = begin; c < in_features; c += STRIDE) {
        wait_for_copies<STAGES - 2>();
        meet_team<ROW_WARPS>(team);  // all copies are there, and all threads have read the stage that is filled next
        const int ahead = c + (STAGES - 1) * STRIDE;
        if (ahead < in_features) Chunk::fill(ring + next, x, values, positions, ahead, tokens, in_features, member);
        commit_copies();
        Chunk::template add<BF16>(sums, ring + current, first_row, lane);
        next = current;
        current = current == (STAGES - 1) * Chunk::BYTES ? 0 : current + Chunk::BYTES;
    }

    wait_for_copies<0>();
    __syncthreads();  // the sums go where the stages were
#pragma unroll
    for (int tile = 0; tile < Chunk::TILES; ++tile)
#pragma unroll
        for (int column = 0; column < Chunk::COLUMNS; ++column)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = first_row + tile * 16 + i / 2 * 8 + lane / 4, token = column * 8 + lane % 4 * 2 + i % 2;
                store_float(shared + 4 * ((team * TOKENS + token) * SUMS_ROW + row), sums[tile][column][i]);
            }
    add_up<0, BF16, ROWS, TOKENS, WARPS, TEAMS, SPLITS>(shared, bias, nullptr, nullptr, y, block_row, tokens,
                                                        out_features, has_bias);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(SPARSE_LINEAR_MMA_MODEL)
// What all warps of a block copy and multiply at once: 256 bytes of channels (128 of 16 bits, 256 of 8), of ROWS rows of W
// and of TOKENS rows of x. Rows of 128 bytes lie in shared memory as wgmma wants them: the 16-byte units of row r change
// places by r % 8. x is two such matrices, of half of the channels each. Positions lie in units of 16 bytes, of all rows
// the first unit, then of all rows the second.
template <int FP8, int ROWS, int TOKENS>
struct WideStage {
    static constexpr int WIDTH = FP8 ? 1 : 2, CHANNELS = 256 / WIDTH, UNITS = CHANNELS / 128;  // UNITS of positions per row
    static constexpr int THREADS = 2 * ROWS, X = ROWS * 128, X_HALF = TOKENS * 128, POSITIONS = X + 2 * X_HALF;
    static constexpr int BYTES = POSITIONS + ROWS * UNITS * 16;

    // Bytes of the kept values of some channels.
    static __device__ __forceinline__ long long values_of(long long channels) { return channels >> FP8; }

    static __device__ __forceinline__ void fill(u32 stage, const u8* x, const u8* values, const u8* positions, int c,
                                                int tokens, int in_features, int thread) {
        int row = thread / 8, unit = thread % 8;
        const u8* from = values + values_of((long long)row * in_features + c) + 16 * unit;
        u32 to = stage + row * 128 + (unit ^ row % 8) * 16;
#pragma unroll
        for (int i = 0; i < ROWS * 8 / THREADS; ++i) {
            copy_16(to + i * (THREADS / 8) * 128, from, true);
            from += values_of(THREADS / 8 * (long long)in_features);
        }
        row = thread / UNITS, unit = thread % UNITS;
        if (thread < ROWS * UNITS)
            copy_16(stage + POSITIONS + (unit * ROWS + row) * 16,
                    positions + (long long)row * (in_features / 8) + c / 8 + 16 * unit, true);
        row = thread / 16, unit = thread % 16;
        from = x + ((long long)row * in_features + c) * WIDTH + 16 * unit;
        to = stage + X + unit / 8 * X_HALF;
#pragma unroll
        for (int i = 0; i < (TOKENS * 16 + THREADS - 1) / THREADS; ++i) {
            const int token = row + i * (THREADS / 16);
            if (token < tokens) copy_16(to + token * 128 + (unit % 8 ^ token % 8) * 16, from, true);
            from += THREADS / 16 * (long long)in_features * WIDTH;
        }
    }

    static __device__ __forceinline__ void expect(const u8* values, const u8* positions, int c, bool first,
                                                  int in_features, int thread) {
        if (thread >= ROWS) return;
        bring_to_l2(values + values_of((long long)thread * in_features + c));
        if (first) bring_to_l2(positions + (long long)thread * (in_features / 8) + c / 8);
    }

    // Describes rows of 128 bytes, swizzled within 128 bytes; each eight rows begin 1024 bytes after the eight before.
    static __device__ __forceinline__ u64 describe(u32 from) {
        return u64(from >> 4) | u64(1) << 16 | u64(1024 / 16) << 32 | u64(1) << 62;
    }

    // Begins to add a chunk, in products of 64 bytes of channels; of 8 bits, the sums begin anew.
    // Positions of 16 bits: of every four threads, the first two hold those of the first two products, the others those
    // of the last two; of each two, the first holds the first 16 channels, for two rows. Of 8 bits: of every four
    // threads, the first two hold those of the first 32 channels, the others of the last 32, each for one row.
    template <int BF16>
    static __device__ __forceinline__ void add(float (&sums)[TOKENS / 2], u32 stage, int warp, int lane) {
        const u32 words = stage + POSITIONS + (warp * 16 + lane / 4) * 16;
        u32 metadata[4];
        if constexpr (FP8) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                metadata[i] = load_word(words + lane % 2 * 8 * 16 + i / 2 * ROWS * 16 + i % 2 * 8 + lane % 4 / 2 * 4);
        } else {
            u32 upper[2], lower[2];
            load_two_words(upper, words + lane % 4 / 2 * 8);
            load_two_words(lower, words + lane % 4 / 2 * 8 + 8 * 16);  // of the row eight rows further
#pragma unroll
            for (int i = 0; i < 4; ++i)
                metadata[i] = __byte_perm(upper[i % 2], lower[i % 2], lane % 2 ? 0x7632 : 0x5410);
        }
        const u64 a = describe(stage + warp / 4 * (64 * 128)), b = describe(stage + X), half = X_HALF / 16;
        begin_products();
        multiply_wide<FP8, BF16, TOKENS, 0, !FP8>(sums, a, b, metadata[0]);
        multiply_wide<FP8, BF16, TOKENS, 0, 1>(sums, a + 2, b + 4, metadata[1]);
        multiply_wide<FP8, BF16, TOKENS, !FP8, 1>(sums, a + 4, b + half, metadata[2]);
        multiply_wide<FP8, BF16, TOKENS, !FP8, 1>(sums, a + 6, b + half + 4, metadata[3]);
        end_products();
    }
};

// The same product by wgmma; in_features is a multiple of a stage's channels, a warp has 16 rows, and ROWS is a multiple of
// 64. Of 8 bits, row_scales [out_features] and token_scales [tokens] multiply the sums; of 16 they are not read.
// The tensor cores sum products of 8 bits with some 14 bits, although the result is float32, so that a long sum would
// lose its last terms: the sums of each chunk are added to totals.
template <int FP8, int BF16, int ROWS, int TOKENS, int STAGES, int SPLITS>
__global__ void CLUSTER_OF(SPLITS) __launch_bounds__(2 * ROWS)
    sparse_linear_wgmma(const u8* x, const u8* values, const u8* positions, const u16* bias, const float* row_scales,
                        const float* token_scales, u16* y, int tokens, int out_features, int in_features, int has_bias) {
    using Chunk = WideStage<FP8, ROWS, TOKENS>;
    constexpr int STRIDE = Chunk::CHANNELS * SPLITS;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int block_row = min(int(blockIdx.x) * ROWS, out_features - ROWS);
    const int first_token = int(blockIdx.z) * TOKENS;
    x += (long long)first_token * in_features * Chunk::WIDTH;
    y += (long long)first_token * out_features;
    token_scales += first_token;
    tokens = min(tokens - first_token, TOKENS);
    values += Chunk::values_of((long long)block_row * in_features);
    positions += (long long)block_row * (in_features / 8);
    const u32 shared = (shared_start() + 1023) / 1024 * 1024;
    const int begin = int(blockIdx.y) * Chunk::CHANNELS;
    float sums[TOKENS / 2] = {}, totals[FP8 ? TOKENS / 2 : 1] = {};

#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        const int c = begin + stage * STRIDE;
        if (c < in_features) Chunk::expect(values, positions, c, stage == 0, in_features, thread);
    }
    wait_for_kernel_before();
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        const int c = begin + stage * STRIDE;
        if (c < in_features)
            Chunk::fill(shared + stage * Chunk::BYTES, x, values, positions, c, tokens, in_features, thread);
        commit_copies();
    }
    u32 current = 0, next = (STAGES - 1) * Chunk::BYTES;
#pragma unroll 1
    for (int c = begin; c < in_features; c += STRIDE) {
        wait_for_copies<STAGES - 2>();
        show_to_products();
        __syncthreads();  // all copies are there, and all products that read the stage that is filled next have ended
        Chunk::template add<BF16>(sums, shared + current, warp, lane);
        const int ahead = c + (STAGES - 1) * STRIDE;
        if (ahead < in_features) Chunk::fill(shared + next, x, values, positions, ahead, tokens, in_features, thread);
        commit_copies();
        wait_for_products();
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i)
            if constexpr (FP8) totals[i] += sums[i];
        next = current;
        current = current == (STAGES - 1) * Chunk::BYTES ? 0 : current + Chunk::BYTES;
    }

    wait_for_copies<0>();
    __syncthreads();  // the sums go where the stages were
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) {
        const int row = warp * 16 + i / 2 % 2 * 8 + lane / 4, token = i / 4 * 8 + lane % 4 * 2 + i % 2;
        store_float(shared + 4 * (token * (ROWS + 4) + row), FP8 ? totals[FP8 ? i : 0] : sums[i]);
    }
    add_up<FP8, BF16, ROWS, TOKENS, ROWS / 16, 1, SPLITS>(shared, bias, row_scales, token_scales, y, block_row, tokens,
                                                          out_features, has_bias);
}
#endif
