// Gather of channels, y[r, j] = x[r, index[j]], by hand: the yardstick of the Triton kernel, with the same results.
//
// A block of threads walks over tiles of rows x one segment of channels. A segment is a run of channels that the index
// keeps to itself: the whole row, or, where it permutes inside blocks (128-byte lines, say), any number of them, so that
// rows of any length are staged. 16-byte loads, one 32-bit word a channel in shared memory that holds four rows of 8-bit
// or two rows of 16-bit values, a gather of words, 16-byte stores. The segment's index stays in shared memory too, as
// 16-bit numbers. Rows that are not aligned to 16 bytes move value by value. Segments that shared memory does not hold
// are gathered from global memory. An entry outside of the segment reads its first channel.
#include <cstdint>

template <typename Value, int COUNT>
struct alignas(sizeof(Value) * COUNT < 16 ? sizeof(Value) * COUNT : 16) Run {
    Value at[COUNT];
};

template <typename Value, typename Word, int PACK, bool WIDE>
__global__ void __launch_bounds__(256)
    permute_staged(const Value* x, const int32_t* index, Value* y, int64_t rows, int channels, int64_t stride,
                   int segment) {
    constexpr int COUNT = WIDE ? 16 / sizeof(Value) : 1;
    constexpr int BITS = PACK > 1 ? 8 * sizeof(Value) : 0;
    extern __shared__ uint4 shared[];
    Word* words = reinterpret_cast<Word*>(shared);
    uint16_t* from = reinterpret_cast<uint16_t*>(words + (segment + 15) / 16 * 16);
    const int first = blockIdx.y * segment;
    const int here = min(segment, channels - first);
    for (int j = threadIdx.x; j < here; j += blockDim.x) {
        const int source = index[first + j] - first;
        from[j] = source >= 0 && source < here ? source : 0;
    }
    for (int64_t row = int64_t(blockIdx.x) * PACK; row < rows; row += int64_t(gridDim.x) * PACK) {
        for (int c = threadIdx.x * COUNT; c < here; c += blockDim.x * COUNT) {
            Run<Word, COUNT> staged{};
#pragma unroll
            for (int part = 0; part < PACK; ++part) {
                if (row + part < rows) {
                    const Value* source = x + (row + part) * stride + first + c;
                    const Run<Value, COUNT> run = *reinterpret_cast<const Run<Value, COUNT>*>(source);
#pragma unroll
                    for (int i = 0; i < COUNT; ++i) staged.at[i] |= Word(run.at[i]) << (part * BITS);
                }
            }
            *reinterpret_cast<Run<Word, COUNT>*>(words + c) = staged;
        }
        __syncthreads();
        for (int j = threadIdx.x * COUNT; j < here; j += blockDim.x * COUNT) {
            const Run<uint16_t, COUNT> source = *reinterpret_cast<const Run<uint16_t, COUNT>*>(from + j);
            Run<Word, COUNT> gathered;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) gathered.at[i] = words[source.at[i]];
#pragma unroll
            for (int part = 0; part < PACK; ++part) {
                if (row + part < rows) {
                    Run<Value, COUNT> run;
#pragma unroll
                    for (int i = 0; i < COUNT; ++i) run.at[i] = Value(gathered.at[i] >> (part * BITS));
                    *reinterpret_cast<Run<Value, COUNT>*>(y + (row + part) * channels + first + j) = run;
                }
            }
        }
        __syncthreads();
    }
}

template <typename Value>
__global__ void __launch_bounds__(256)
    permute_direct(const Value* x, const int32_t* index, Value* y, int64_t rows, int channels, int64_t stride) {
    for (int j = blockIdx.y * blockDim.x + threadIdx.x; j < channels; j += gridDim.y * blockDim.x) {
        const int entry = index[j];
        const int source = entry >= 0 && entry < channels ? entry : 0;
        for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) y[row * channels + j] = x[row * stride + source];
    }
}

#ifndef PERMUTE_KERNELS_ONLY  // a test runs the kernels above on a CPU
#include <cuda_runtime.h>

#include <algorithm>

template <typename Value, typename Word, int PACK>
cudaError_t staged(const void* x, const int32_t* index, void* y, int64_t rows, int channels, int64_t stride,
                   int segment, bool wide, size_t bytes, int processors, cudaStream_t stream) {
    auto* kernel = wide ? permute_staged<Value, Word, PACK, true> : permute_staged<Value, Word, PACK, false>;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
    if (error != cudaSuccess) return error;
    const int segments = (channels + segment - 1) / segment;
    const int64_t tiles = (rows + PACK - 1) / PACK;
    const int64_t most = std::max<int64_t>(int64_t(processors) * 8 / segments, 1);
    kernel<<<dim3(unsigned(std::min(tiles, most)), segments), 256, bytes, stream>>>(
        static_cast<const Value*>(x), index, static_cast<Value*>(y), rows, channels, stride, segment);
    return cudaGetLastError();
}

template <typename Value, typename Word, int PACK>
cudaError_t permute(const void* x, const int32_t* index, void* y, int64_t rows, int channels, int64_t stride,
                    int segment, cudaStream_t stream) {
    int device = 0, limit = 0, processors = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    const size_t padded = (size_t(segment) + 15) / 16 * 16;
    const size_t packed = padded * (sizeof(Word) + 2), plain = padded * (sizeof(Value) + 2);
    const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
    const int count = 16 / sizeof(Value);
    const bool wide = aligned(x) && aligned(y) && stride % count == 0 && channels % count == 0 && segment % count == 0;
    if (segment <= 65536 && packed <= size_t(limit))
        return staged<Value, Word, PACK>(x, index, y, rows, channels, stride, segment, wide, packed, processors, stream);
    if (segment <= 65536 && plain <= size_t(limit))
        return staged<Value, Value, 1>(x, index, y, rows, channels, stride, segment, wide, plain, processors, stream);
    const unsigned blocks = unsigned(std::min<int64_t>(rows, int64_t(processors) * 8));
    permute_direct<Value><<<dim3(blocks, (channels + 255) / 256), 256, 0, stream>>>(
        static_cast<const Value*>(x), index, static_cast<Value*>(y), rows, channels, stride);
    return cudaGetLastError();
}

// x [rows, channels] with `stride` values between rows, y contiguous, values of `size` bytes; nothing may be empty.
// Returns a cudaError_t.
extern "C" int permtriton_permute(const void* x, const int32_t* index, void* y, int64_t rows, int channels,
                                  int64_t stride, int size, int segment, void* stream) {
    const auto s = static_cast<cudaStream_t>(stream);
    switch (size) {
        case 1: return permute<uint8_t, uint32_t, 4>(x, index, y, rows, channels, stride, segment, s);
        case 2: return permute<uint16_t, uint32_t, 2>(x, index, y, rows, channels, stride, segment, s);
        case 4: return permute<uint32_t, uint32_t, 1>(x, index, y, rows, channels, stride, segment, s);
        case 8: return permute<uint64_t, uint64_t, 1>(x, index, y, rows, channels, stride, segment, s);
        default: return cudaErrorInvalidValue;
    }
}
#endif
