/* SPDX-License-Identifier: Apache-2.0 */
/* src/cuda/hopper.cuh, whose comments say what each function does, in C++: see emulator.h. */
#ifndef RAFTER_CUDA_HOPPER_CUH
#define RAFTER_CUDA_HOPPER_CUH

#include <cuda.h>

#include "cuda/cluster.cuh"

#define __CUDA_ARCH_FEAT_SM90_ALL

DEVICE void group_sync(int number) {
    sync_some<128>(number);
}

/* ---- barriers -------------------------------------------------------------------------------- */

/* The parts of the 64 bits in shared memory. */
struct EmulatedBarrier {
    uint64_t arrivals : 12, missing : 12, bytes : 24, parity : 1;
};

/* Other blocks of the cluster change it too. */
template <typename F> DEVICE void change_barrier(uint64_t *barrier, F f) {
    uint64_t *const word = aligned<uint64_t>(barrier);
    uint64_t old = __atomic_load_n(word, __ATOMIC_SEQ_CST), next;
    do {
        EmulatedBarrier b = bits_as<EmulatedBarrier>(old);
        f(b);
        if (b.missing == 0 && b.bytes == 0) {
            b.missing = b.arrivals;
            b.parity ^= 1;
        }
        next = bits_as<uint64_t>(b);
    } while (!__atomic_compare_exchange_n(word, &old, next, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
}

DEVICE void barrier_init(uint64_t *barrier, unsigned arrivals) {
    EmulatedBarrier b = {};
    b.arrivals = b.missing = arrivals;
    *aligned<uint64_t>(barrier) = bits_as<uint64_t>(b);
}
DEVICE void barriers_ready() {
}
DEVICE void barrier_expect(uint64_t *barrier, unsigned bytes) {
    change_barrier(barrier, [&](EmulatedBarrier &b) {
        b.bytes += bytes; /* wraps around if the copies have come first */
        b.missing--;
    });
}
DEVICE void barrier_arrive(uint64_t *barrier) {
    change_barrier(barrier, [](EmulatedBarrier &b) { b.missing--; });
}
DEVICE void barrier_arrive_at(unsigned barrier, unsigned rank) {
    barrier_arrive(static_cast<uint64_t *>(emulator::in_cluster(shared_pointer(barrier), rank)));
}
DEVICE void barrier_wait(uint64_t *barrier, unsigned parity) {
    while (bits_as<EmulatedBarrier>(__atomic_load_n(barrier, __ATOMIC_SEQ_CST)).parity == parity)
        emulator::yield();
    emulator::passed();
}
DEVICE void barrier_wait(unsigned barrier, unsigned parity) {
    barrier_wait(static_cast<uint64_t *>(shared_pointer(barrier)), parity);
}

/* ---- copies ---------------------------------------------------------------------------------- */

/* Calls f(shared, element) for each element of a box; element is NULL outside of the tensor. Returns the box's bytes. */
template <typename F> DEVICE unsigned for_box(char *shared, const CUtensorMap *map, const int (&first)[5], F f) {
    const int bytes = map->type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
    const bool swizzled = map->swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
    const unsigned rows = map->dims > 1 ? map->box[1] : 1, row_bytes = map->box[0] * static_cast<unsigned>(bytes);
    if (swizzled && row_bytes != 128)
        emulator::fail("a swizzled box's rows have 128 bytes here");
    if ((reinterpret_cast<uintptr_t>(shared) - reinterpret_cast<uintptr_t>(emulated_shared)) %
            (swizzled ? 1024 : 128) !=
        0)
        emulator::fail("a box in shared memory is not aligned");
    for (unsigned row = 0; row < rows; row++)
        for (unsigned column = 0; column < map->box[0]; column++) {
            const int64_t at[5] = {first[0] + int64_t(column), first[1] + int64_t(row), first[2], first[3], first[4]};
            char *element = map->data + at[0] * bytes;
            bool inside = true;
            for (unsigned d = 0; d < map->dims; d++) {
                inside = inside && at[d] >= 0 && at[d] < static_cast<int64_t>(map->size[d]);
                element += d > 0 ? at[d] * static_cast<int64_t>(map->stride[d - 1]) : 0;
            }
            const unsigned offset = row * row_bytes + column * static_cast<unsigned>(bytes);
            f(shared + (swizzled ? offset ^ (offset >> 7 & 7) << 4 : offset), inside ? element : nullptr, bytes);
        }
    return rows * row_bytes;
}
DEVICE void copy_emulated_box(void *to, const CUtensorMap *map, const int (&first)[5], uint64_t *barrier) {
    const unsigned bytes =
        for_box(static_cast<char *>(to), map, first, [](char *shared, const char *element, int size) {
            element ? memcpy(shared, element, static_cast<size_t>(size)) : memset(shared, 0, static_cast<size_t>(size));
        });
    change_barrier(barrier, [&](EmulatedBarrier &b) { b.bytes -= bytes; });
}

DEVICE void prefetch_map(const CUtensorMap *) {
}
DEVICE void copy_box(void *to, const CUtensorMap *map, int column, int row, uint64_t *barrier) {
    copy_emulated_box(to, map, {column, row, 0, 0, 0}, barrier);
}
DEVICE void copy_box(void *to, const CUtensorMap *map, int column, int row, const int (&outer)[3], uint64_t *barrier) {
    copy_emulated_box(to, map, {column, row, outer[0], outer[1], outer[2]}, barrier);
}
DEVICE void prefetch_box(const CUtensorMap *, int, int, const int (&)[3]) {
}
DEVICE void copy_box_to_all(void *to, const CUtensorMap *map, int column, int row, uint64_t *barrier,
                            unsigned short mask) {
    for (unsigned rank = 0; rank < 16; rank++)
        if (mask >> rank & 1) {
            const unsigned bytes = for_box(static_cast<char *>(to), map, {column, row, 0, 0, 0},
                                           [&](char *shared, const char *element, int size) {
                                               void *const there = emulator::in_cluster(shared, rank);
                                               element ? memcpy(there, element, static_cast<size_t>(size))
                                                       : memset(there, 0, static_cast<size_t>(size));
                                           });
            change_barrier(static_cast<uint64_t *>(emulator::in_cluster(barrier, rank)),
                           [&](EmulatedBarrier &b) { b.bytes -= bytes; });
        }
}
DEVICE void shared_written() {
}
DEVICE void store_box(const CUtensorMap *map, int column, int row, const void *from) {
    for_box(static_cast<char *>(const_cast<void *>(from)), map, {column, row, 0, 0, 0},
            [](const char *shared, char *element, int size) {
                if (element)
                    memcpy(element, shared, static_cast<size_t>(size));
            });
}
template <typename T> DEVICE void add_number(char *to, const char *from) {
    *reinterpret_cast<T *>(to) =
        from_float<T>(to_float(*reinterpret_cast<T *>(to)) + to_float(*reinterpret_cast<const T *>(from)));
}
DEVICE void add_box(const CUtensorMap *map, int column, int row, const void *from) {
    for_box(static_cast<char *>(const_cast<void *>(from)), map, {column, row, 0, 0, 0},
            [&](const char *shared, char *element, int) {
                if (!element)
                    return;
                switch (map->type) {
                case CU_TENSOR_MAP_DATA_TYPE_FLOAT32: return add_number<float>(element, shared);
                case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return add_number<bf16>(element, shared);
                default: return add_number<fp16>(element, shared);
                }
            });
}
template <int N> DEVICE void stores_wait() {
}
DEVICE void stores_wait_all() {
}

DEVICE void store_8x8x4(void *row, const unsigned (&u)[4]) {
    const unsigned lane = emulator::place.lane;
    const uint64_t *const rows = emulator::exchange(~0u, reinterpret_cast<uintptr_t>(row));
    for (unsigned k = 0; k < 4; k++)
        reinterpret_cast<unsigned *>(rows[8 * k + lane / 4])[lane % 4] = u[k];
}

/* ---- products -------------------------------------------------------------------------------- */

template <bool TRANSPOSED> DEVICE unsigned operand_of(unsigned shared, int chunk) {
    return (shared & 0x3ffff) >> 4 | (TRANSPOSED ? chunk >> 4 : 1) << 16;
}
template <int BYTES> constexpr unsigned OPERAND_BYTES = BYTES >> 4;
template <bool TRANSPOSED> constexpr unsigned OPERAND_STEP = OPERAND_BYTES<TRANSPOSED ? 16 * 128 : 16 * 2>;

DEVICE void products_begin() {
}
DEVICE void products_commit() {
}
/* A product is one instruction of the whole warpgroup: when a thread has waited for it, all have read their operands. */
template <int N> DEVICE void products_wait() {
    emulator::sync_threads(emulator::FIRST_GROUP_BARRIER + static_cast<int>(threadIdx.x / emulator::GROUP_THREADS),
                           emulator::GROUP_THREADS);
}

/* 16 elements of the reduced dimension in row `row` of an operand. */
template <typename T, bool TRANSPOSED> DEVICE void load_operand(unsigned operand, unsigned row, float (&k)[16]) {
    const unsigned base = (operand & 0x3fff) << 4, chunk = (operand >> 16) << 4;
    for (unsigned i = 0; i < 16; i++) {
        const unsigned at = TRANSPOSED ? base + row / 64 * chunk + i * 128 + row % 64 * 2 : base + row * 128 + i * 2;
        k[i] = to_float(*reinterpret_cast<const T *>(emulated_shared + (at ^ (at >> 7 & 7) << 4)));
    }
}

template <typename T, bool A_TRANSPOSED, bool B_TRANSPOSED, unsigned SUMS>
DEVICE void multiply_64xNx16(float (&d)[SUMS], unsigned a, unsigned b, int add) {
    const unsigned warp = threadIdx.x / 32 % 4, lane = emulator::place.lane;
    float rows[2][16];
    for (unsigned i = 0; i < 2; i++)
        load_operand<T, A_TRANSPOSED>(a, 16 * warp + lane / 4 + 8 * i, rows[i]);
    for (unsigned j = 0; j < SUMS / 4; j++)
        for (unsigned c = 0; c < 2; c++) {
            float column[16];
            load_operand<T, B_TRANSPOSED>(b, 8 * j + 2 * (lane % 4) + c, column);
            for (unsigned i = 0; i < 2; i++) {
                float sum = add ? d[4 * j + 2 * i + c] : 0.0f;
                for (int k = 0; k < 16; k++)
                    sum += rows[i][k] * column[k];
                d[4 * j + 2 * i + c] = sum;
            }
        }
}
template <int REGISTERS> DEVICE void take_registers() {
}
template <int REGISTERS> DEVICE void give_registers() {
}

#endif
