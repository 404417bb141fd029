// What sparse_linear_mma.cu takes from a GPU, on a CPU: written from the PTX manual (sections of version 9),
// not from the kernel, so that a fragment or metadata in a wrong place shows in the result.
//
// Every thread of a cluster is a fiber. A fiber runs until it waits for others, so that a missing barrier shows too:
// the others have then written nothing. Shared memory starts as NaN, and is NaN again where a block has ended.
// Asynchronous copies land when they are waited for, or, if `eager`, at once: both are allowed, and a kernel that is
// right gives the same result.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(x)
#define SPARSE_LINEAR_MMA_MODEL
using std::min;
struct dim3 { int x, y, z; };

struct Copy { uint32_t to; const uint8_t* from; int bytes; bool there; };
struct Meeting { int arrived = 0, round = 0; };
struct Warp { Meeting meeting; uint32_t posted[32][9]; };
struct Block {
    std::vector<uint8_t> shared;
    Meeting meeting, teams[16];
    std::vector<Warp> warps;
    int running;
};
struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    dim3 thread, block_index;
    Block* block;
    Warp* warp;
    std::vector<std::vector<Copy>> groups{1};
    std::vector<std::function<void()>> products;
    bool done = false, waited = false;
};
struct Range { const uint8_t* from; int64_t bytes; };

static ucontext_t scheduler;
static Fiber* me;
static std::vector<Block> cluster;
static Meeting cluster_meeting;
static std::vector<Range> readable;
static bool eager;
static int error;  // 1: read outside of a tensor, 2: outside of shared memory, 3: not aligned, 4: undefined metadata,
                   // 5: read before the kernel before has ended
#define threadIdx (me->thread)
#define blockIdx (me->block_index)

static void wait_until(const std::function<bool()>& ready) {
    while (!ready()) swapcontext(&me->context, &scheduler);
}
static void meet_at(Meeting& meeting, int count) {
    const int round = meeting.round;
    if (++meeting.arrived == count) meeting.arrived = 0, ++meeting.round;
    wait_until([&] { return meeting.round != round; });
}
static void __syncwarp() { meet_at(me->warp->meeting, 32); }
static void __syncthreads() { meet_at(me->block->meeting, 32 * int(me->block->warps.size())); }
template <int WARPS>
static void meet_team(int team) { meet_at(me->block->teams[team], 32 * WARPS); }
template <bool CLUSTER>
static void meet() {
    if (!CLUSTER) return __syncthreads();
    meet_at(cluster_meeting, 32 * int(me->block->warps.size() * cluster.size()));
}

static uint8_t* shared_at(uint32_t address, int bytes, Block& block) {
    static uint8_t nowhere[16];
    if (address % bytes) error = 3;
    if (address < 256 || address - 256 + bytes > block.shared.size()) return error = 2, nowhere;
    return &block.shared[address - 256];
}
static uint32_t shared_start() { return 256; }
static void land(const Copy& copy) {
    uint8_t* to = shared_at(copy.to, copy.bytes, *me->block);
    if (copy.there) std::memcpy(to, copy.from, copy.bytes);
    else std::memset(to, 0, copy.bytes);
}
static bool can_read(const uint8_t* from, int bytes) {
    const auto holds = [&](const Range& one) { return from >= one.from && from + bytes <= one.from + one.bytes; };
    return std::any_of(readable.begin(), readable.end(), holds);
}
// Section 9.7.9.15, prefetch: nothing is seen of it. Section 9.7.14.13, griddepcontrol: what earlier kernels wrote can be
// seen, and what they read may be written, from here on.
static void bring_to_l2(const uint8_t* from) { if (!can_read(from, 1)) error = 1; }
static void wait_for_kernel_before() { me->waited = true; }
static void copy(uint32_t to, const uint8_t* from, int bytes, bool there) {
    if (!me->waited) error = 5;
    if (reinterpret_cast<uintptr_t>(from) % bytes) error = 3;
    if (!can_read(from, bytes)) error = 1, there = false;
    me->groups.back().push_back({to, from, bytes, there});
    if (eager) land(me->groups.back().back());
}
static void copy_16(uint32_t to, const uint8_t* from, bool there) { copy(to, from, 16, there); }
static void copy_4(uint32_t to, const uint8_t* from) { copy(to, from, 4, true); }
static void commit_copies() { me->groups.emplace_back(); }
template <int GROUPS>
static void wait_for_copies() {  // all but the latest GROUPS committed groups
    while (int(me->groups.size()) - 1 > GROUPS) {
        if (!eager) for (const Copy& one : me->groups.front()) land(one);
        me->groups.erase(me->groups.begin());
    }
}

// Shows all threads of the warp what each of them gives.
static uint32_t (*posted(std::initializer_list<uint32_t> words))[9] {
    std::copy(words.begin(), words.end(), me->warp->posted[me->thread.x % 32]);
    __syncwarp();
    return me->warp->posted;
}
// Section 9.7.14.5.15, ldmatrix: threads 8 i to 8 i + 7 give the addresses of matrix i's rows of 16 bytes; each thread
// gets the pair (lane % 4) of row (lane / 4) of each matrix.
static void load_matrices(uint32_t (&to)[4], uint32_t row) {
    const int lane = me->thread.x % 32;
    auto rows = posted({row});
    for (int matrix = 0; matrix < 4; ++matrix)
        std::memcpy(&to[matrix], shared_at(rows[8 * matrix + lane / 4][0], 16, *me->block) + lane % 4 * 4, 4);
    __syncwarp();
}
static uint32_t load_word(uint32_t from) {
    uint32_t word;
    std::memcpy(&word, shared_at(from, 4, *me->block), 4);
    return word;
}
static void store_float(uint32_t to, float value) { std::memcpy(shared_at(to, 4, *me->block), &value, 4); }
template <bool CLUSTER>
static void load_floats(float (&to)[4], uint32_t from, int block) {
    std::memcpy(to, shared_at(from, 16, CLUSTER ? cluster[block] : *me->block), 16);
}
// The instruction prmt without a mode: nibble i of the selector names the byte of the pair (low, high) for byte i.
static uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t both = uint64_t(high) << 32 | low;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) result |= uint32_t(both >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
    return result;
}

template <int BF16>
static float widen(uint16_t value) {
    float wide;
    if (BF16) {
        const uint32_t bits = uint32_t(value) << 16;
        std::memcpy(&wide, &bits, 4);
        return wide;
    }
    _Float16 half;
    std::memcpy(&half, &value, 2);
    return float(half);
}
template <int BF16>
static uint16_t narrow(float value) {
    uint16_t narrowed;
    if (BF16) {  // to the nearest, ties to even; NaN stays NaN
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        return std::isnan(value) ? 0x7FFF : uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    }
    const _Float16 half = _Float16(value);
    std::memcpy(&narrowed, &half, 2);
    return narrowed;
}

// Section 9.7.14.6.2.2, sparse mma.m16n8k32 with .f16 and .bf16. A row of A has eight chunks of four columns, each with
// two values. Registers 0 and 1 of thread t of group g (lane 4 g + t) hold chunk t of rows g and g + 8, registers 2 and
// 3 chunk t + 4 of them. Register i of B holds rows 8 i + 2 t and 8 i + 2 t + 1 of column g. Sums: row g (i < 2) or
// g + 8, column 2 t + i % 2. Metadata (figure 122; section 9.7.14.6.1 for the order of bits and the selector): the
// threads 0 and 1, or 2 and 3, of each group, by the selector, hold the chunks 0 to 3 and 4 to 7; bits 0 to 15 are of
// row g, 16 to 31 of row g + 8.
template <int BF16, int SELECTOR>
static void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[4], uint32_t metadata) {
    const int lane = me->thread.x % 32;
    auto all = posted({a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], metadata});
    for (int i = 0; i < 4; ++i) {
        const int group = lane / 4, half = i / 2, column = lane % 4 * 2 + i % 2;
        for (int chunk = 0; chunk < 8; ++chunk) {
            const uint32_t pair = all[4 * group + chunk % 4][chunk / 4 * 2 + half];
            const uint32_t word = all[4 * group + 2 * SELECTOR + chunk / 4][8];
            const int bits = word >> (16 * half + 4 * (chunk % 4)) & 15, places[2] = {bits & 3, bits >> 2};
            if (places[0] >= places[1]) error = 4;
            for (int j = 0; j < 2; ++j) {
                const int k = 4 * chunk + places[j];
                const uint32_t inputs = all[4 * column + k % 8 / 2][4 + k / 8];
                d[i] += widen<BF16>(uint16_t(pair >> (16 * j))) * widen<BF16>(uint16_t(inputs >> (16 * (k % 2))));
            }
        }
    }
    __syncwarp();
}

// Section 9.7.15, asynchronous products of four warps. A descriptor holds the address and the distance of eight rows to
// the next eight, in units of 16 bytes (section 9.7.15.5.1.2); its mode 1 swaps the units of 16 bytes within 128: bits
// 4 to 6 of an address change by bits 7 to 9. Rows of A lie 128 bytes apart, 16 of them per warp, and so do those of B, a
// token each. Sums and metadata of a warp are those of mma.sp (figures of section 9.7.15.6). What they read may be read at
// any time until they are waited for.
static uint8_t* operand_at(uint64_t description, int row, int byte, int bytes, Block& block) {
    if (description >> 62 != 1 || (description >> 49 & 7)) error = 6;
    uint32_t at = (description & 0x3FFF) * 16 + row / 8 * uint32_t((description >> 32 & 0x3FFF) * 16) + row % 8 * 128 + byte;
    at ^= (at >> 7 & 7) << 4;
    return shared_at(at, bytes, block);
}
template <int FP8, int BF16>
static float operand(uint64_t description, int row, int element, Block& block) {
    if (FP8) {  // e4m3: no infinity, one NaN of each sign
        const int bits = *operand_at(description, row, element, 1, block), exponent = bits >> 3 & 15, fraction = bits & 7;
        const float size = exponent ? std::ldexp(8.f + fraction, exponent - 10) : std::ldexp(fraction, -9);
        return (bits & 127) == 127 ? NAN : bits >> 7 ? -size : size;
    }
    uint16_t value;
    std::memcpy(&value, operand_at(description, row, 2 * element, 2, block), 2);
    return widen<BF16>(value);
}
// Hopper adds products of 8 bits as fixed-point numbers: bits below 2^-13 of the largest term are cut off (so DeepSeek-V3's
// report, section 3.5.2, found it; no manual says it).
template <int COUNT>
static float sum_of_few_bits(const float (&terms)[COUNT]) {
    float largest = 0;
    for (float term : terms) largest = std::fmax(largest, std::fabs(term));
    double sum = 0;
    const double unit = largest > 0 && std::isfinite(largest) ? std::ldexp(1.0, std::ilogb(largest) - 13) : 0;
    for (float term : terms) sum += unit ? std::trunc(term / unit) * unit : term;
    return float(sum);
}
// Metadata of 8 bits (the figure of section 9.7.15.6 for .e4m3; CUTLASS's ELayout_64x64): 32 bits are 32 channels of one
// row; bit 0 of a thread's number says row g or g + 8, bit 1 the first or the last 32 channels.
template <int FP8, int BF16, int TOKENS, int SELECTOR, int ADDS>
static void multiply_wide(float (&d)[TOKENS / 2], uint64_t a, uint64_t b, uint32_t metadata) {
    const int lane = me->thread.x % 32, first = me->thread.x / 32 % 4 * 16;
    if (FP8 && SELECTOR) error = 6;
    auto all = posted({metadata});
    uint64_t positions[2] = {};  // of row g and of row g + 8, 4 bits per group
    for (int half = 0; half < 2; ++half)
        for (int i = 0; i < 2; ++i)
            positions[half] |= FP8 ? uint64_t(all[lane / 4 * 4 + half + 2 * i][0]) << (32 * i)
                                   : uint64_t(all[lane / 4 * 4 + 2 * SELECTOR + i][0] >> (16 * half) & 0xFFFF) << (16 * i);
    __syncwarp();
    Block* block = me->block;
    const uint64_t upper = positions[0], lower = positions[1];
    const auto add = [=, &d] {
        for (int i = 0; i < TOKENS / 2; ++i) {
            const int half = i / 2 % 2, row = first + half * 8 + lane / 4, token = i / 4 * 8 + lane % 4 * 2 + i % 2;
            constexpr int GROUPS = FP8 ? 16 : 8;
            float terms[1 + 2 * GROUPS] = {ADDS ? d[i] : 0.f};
            for (int group = 0; group < GROUPS; ++group) {
                const int bits = (half ? lower : upper) >> (4 * group) & 15, places[2] = {bits & 3, bits >> 2};
                if (places[0] >= places[1]) error = 4;
                for (int j = 0; j < 2; ++j)
                    terms[1 + 2 * group + j] = operand<FP8, BF16>(a, row, 2 * group + j, *block) *
                                               operand<FP8, BF16>(b, token, 4 * group + places[j], *block);
            }
            d[i] = FP8 ? sum_of_few_bits(terms) : std::accumulate(std::begin(terms), std::end(terms), 0.f);
        }
    };
    if (eager) add();
    else me->products.push_back(add);
}
static void load_two_words(uint32_t (&to)[2], uint32_t from) { std::memcpy(to, shared_at(from, 8, *me->block), 8); }
static void show_to_products() {}
static void begin_products() {}
static void end_products() {}
static void wait_for_products() {
    for (const auto& one : me->products) one();
    me->products.clear();
}

static std::function<void()> body;
static void run_fiber() {
    body();
    me->done = true;
    if (--me->block->running == 0) me->block->shared.assign(me->block->shared.size(), 0xFF);
    swapcontext(&me->context, &scheduler);
}
// Threads run in their order, or, with a seed, in a random one, which is another one whenever all have waited.
static void run_cluster(int column, int layer, int blocks, int threads, int shared_bytes, unsigned seed) {
    std::mt19937 random(seed);
    cluster.assign(blocks, Block{});
    std::vector<std::unique_ptr<Fiber>> fibers;
    for (int y = 0; y < blocks; ++y) {
        Block& block = cluster[y];
        block.shared.assign(shared_bytes, 0xFF);
        block.warps.assign(threads / 32, Warp{});
        block.running = threads;
        for (int x = 0; x < threads; ++x) {
            auto fiber = std::make_unique<Fiber>();
            fiber->thread = {x, 0, 0}, fiber->block_index = {column, y, layer};
            fiber->block = &block, fiber->warp = &block.warps[x / 32];
            fiber->stack = std::make_unique<char[]>(1 << 16);
            getcontext(&fiber->context);
            fiber->context.uc_stack.ss_sp = fiber->stack.get();
            fiber->context.uc_stack.ss_size = 1 << 16;
            makecontext(&fiber->context, run_fiber, 0);
            fibers.push_back(std::move(fiber));
        }
    }
    for (size_t left = fibers.size(); left;) {
        left = 0;
        if (seed) std::shuffle(fibers.begin(), fibers.end(), random);
        for (auto& fiber : fibers) {
            if (fiber->done) continue;
            me = fiber.get();
            swapcontext(&scheduler, &me->context);
            left += !fiber->done;
        }
    }
}
