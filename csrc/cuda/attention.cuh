// Tiles of attention: from global to shared memory, through the tensor cores, and back.
//
// A tile is some rows of q, k, v or a gradient in shared memory, in a pitch of 16 bytes more than a row, so that the eight rows
// of an ldmatrix lie in different banks. A warp takes kM times 16 rows of its block's tile. In a product's result, registers
// d[m][n][i], a lane has row 16 m + lane / 4 + i / 2 * 8 of them and column 8 n + lane % 4 * 2 + i % 2 (ptx.h).
#pragma once

#include "common.cuh"
#include "ptx.h"

namespace pyckpt {
namespace cuda {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kRowStep = 128;  // the numbers kept for each query are padded to a multiple of this, which every tile divides
constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;

template <class T>
struct HeadRows {  // rows of one head
  T* first;
  int64_t stride;
};
template <class T>
struct Operand {  // HeadsView with its type
  T* data;
  int64_t batch, head, row;
  PYCKPT_MEMBER HeadRows<T> rows_of(int64_t b, int64_t h) const { return {data + b * batch + h * head, row}; }
};

// AttentionArguments with types, by value.
template <class T>
struct AttentionCall {
  Operand<const T> q, k, v;
  int64_t heads, kv_heads, queries, keys;
  int64_t reach;        // query i sees keys up to i + reach
  int64_t first_query;  // those before see nothing
  int64_t seen_keys;    // those from here on are seen by nobody
  float scale, scale2;  // scale2: scale log2(e), for scores whose exponentials are powers of 2
  DropoutRule rule;     // its key is at *seed, known on the device alone
  const int64_t* seed;
  int64_t padded;  // queries rounded up to kRowStep

  PYCKPT_MEMBER int64_t visible(int64_t query) const {  // keys that a query sees
    const int64_t seen = query + reach + 1;
    return seen < 0 ? 0 : smaller(seen, seen_keys);
  }
  PYCKPT_MEMBER DropoutRule seeded() const {
    DropoutRule with_key = rule;
    if (seed) with_key.key = uint64_t(*seed);
    return with_key;
  }
};

template <class T, int kWidth>
struct Tile {
  static constexpr int kPitch = kWidth + kVector<T>, kChunks = kWidth / kVector<T>;
  PYCKPT_HD constexpr int elements(int rows) { return rows * kPitch; }

  // Rows [first, first + kRows) of a head, asynchronously; rows outside of [begin, end) are not looked at, and become zeros.
  template <int kRows>
  PYCKPT_DEVICE void fetch(T* tile, const HeadRows<const T>& from, int64_t first, int64_t begin, int64_t end) {
    static_assert(kRows * kChunks % kThreads == 0, "every thread copies as much");
    constexpr int kStep = kThreads / kChunks;
    const int row = int(threadIdx.x) / kChunks, column = int(threadIdx.x) % kChunks * kVector<T>;
    const int low = begin > first ? int(smaller(begin - first, kRows)) : 0, high = int(smaller(end - first, kRows));
    const T* source = from.first + (first + row) * from.stride + column;
#pragma unroll
    for (int i = 0; i < kRows; i += kStep) {
      const bool valid = row + i >= low && row + i < high;
      simt::cp_async_16(tile + (row + i) * kPitch + column, valid ? source : from.first, valid);
      source += kStep * from.stride;
    }
  }

  // d += a b^T: of rows of two tiles, over the width.
  template <int kM, int kN>
  PYCKPT_DEVICE void multiply_rows(float (&d)[kM][kN][4], const T* a, const T* b) {
    const int lane = int(threadIdx.x) % 32;
    const T* const of_a = a + lane % 16 * kPitch + lane / 16 * 8;
    const T* const of_b = b + (lane % 8 + lane / 16 * 8) * kPitch + lane / 8 % 2 * 8;
#pragma unroll
    for (int k = 0; k < kWidth; k += 16) {
      uint32_t left[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) simt::ldmatrix_x4(left[m], of_a + 16 * m * kPitch + k);
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        uint32_t right[4];
        simt::ldmatrix_x4(right, of_b + 8 * n * kPitch + k);
        multiply_pair<kM>(d, n, left, right);
      }
    }
  }

  // d += p b, e += r b: rows of a tile weighted by p, and by r.
  template <int kM, int kSteps>
  PYCKPT_DEVICE void multiply_columns(float (&d)[kM][kWidth / 8][4], const uint32_t (&p)[kSteps][kM][4],
                                      float (&e)[kM][kWidth / 8][4], const uint32_t (&r)[kSteps][kM][4], const T* b) {
    by_columns<kSteps>(b, [&](int k, int n, const uint32_t (&right)[4]) {
      multiply_pair<kM>(d, n, p[k], right);
      multiply_pair<kM>(e, n, r[k], right);
    });
  }
  // d += p b
  template <int kM, int kSteps>
  PYCKPT_DEVICE void multiply_columns(float (&d)[kM][kWidth / 8][4], const uint32_t (&p)[kSteps][kM][4], const T* b) {
    by_columns<kSteps>(b, [&](int k, int n, const uint32_t (&right)[4]) { multiply_pair<kM>(d, n, p[k], right); });
  }

  // A warp's results, times a factor for each of its rows, to rows [first, first + 16 kM) of a head as far as there are any. A
  // factor of 0 gives 0, whatever it is applied to.
  // `staged`: as many rows of a tile that no other warp reads. A warp stores whole rows, 16 bytes a lane.
  template <int kM, class Factor>
  PYCKPT_DEVICE void store(const float (&d)[kM][kWidth / 8][4], const Factor& factor, T* staged, const HeadRows<T>& to,
                           int64_t first, int64_t end) {
    const int lane = int(threadIdx.x) % 32;
    __syncwarp();  // all lanes have read what lay there
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float f = factor(m, half);
        T* const row = staged + (16 * m + 8 * half + lane / 4) * kPitch + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < kWidth / 8; ++n)
          *reinterpret_cast<uint32_t*>(row + 8 * n) =
              f == 0.0f ? 0 : pair_of(d[m][n][2 * half] * f, d[m][n][2 * half + 1] * f, Type<T>{});
      }
    __syncwarp();
#pragma unroll
    for (int i = lane; i < 16 * kM * kChunks; i += 32) {
      const int row = i / kChunks, column = i % kChunks * kVector<T>;
      if (first + row < end)
        *reinterpret_cast<uint4*>(to.first + (first + row) * to.stride + column) =
            *reinterpret_cast<const uint4*>(staged + row * kPitch + column);
    }
  }

 private:
  // multiply(k, n, right factor) for columns n and n + 1 of sixteen rows k of a tile, all of them.
  template <int kSteps, class Multiply>
  PYCKPT_DEVICE void by_columns(const T* b, const Multiply& multiply) {
    const int lane = int(threadIdx.x) % 32;
    const T* const of_b = b + lane % 16 * kPitch + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int n = 0; n < kWidth / 8; n += 2) {
        uint32_t right[4];
        simt::ldmatrix_x4<true>(right, of_b + 16 * k * kPitch + 8 * n);
        multiply(k, n, right);
      }
  }
  // d[., n] and d[., n + 1]
  template <int kM, int kN>
  PYCKPT_DEVICE void multiply_pair(float (&d)[kM][kN][4], int n, const uint32_t (&left)[kM][4], const uint32_t (&right)[4]) {
    const uint32_t low[2] = {right[0], right[1]}, high[2] = {right[2], right[3]};
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      simt::mma_m16n8k16<T>(d[m][n], left[m], low);
      simt::mma_m16n8k16<T>(d[m][n + 1], left[m], high);
    }
  }
};

// A product's result as the left factor of the next one: the registers are where they have to be.
template <class T, int kM, int kN>
PYCKPT_DEVICE void as_left(const float (&d)[kM][kN][4], uint32_t (&left)[kN / 2][kM][4]) {
#pragma unroll
  for (int k = 0; k < kN / 2; ++k)
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        left[k][m][i] = pair_of(d[m][2 * k + i / 2][i % 2 * 2], d[m][2 * k + i / 2][i % 2 * 2 + 1], Type<T>{});
}

// Whether dropout keeps the elements from `first` on, in bits 0 to 3. One Philox block where `first` is a multiple of 4.
PYCKPT_DEVICE unsigned kept_four(const DropoutRule& rule, int64_t first) {
  const int lead = int(first & 3);
  unsigned bits = 0;
  for (int block = 0; block <= (lead ? 1 : 0); ++block) {
    const PhiloxBlock four = philox(rule.key, uint64_t(first) / 4 + unsigned(block));
#pragma unroll
    for (int i = 0; i < 4; ++i) bits |= unsigned(four.word[i] >= rule.threshold) << (4 * block + i);
  }
  return bits >> lead & 15;
}
// Of d[m][n][i] in bit i, where columns are keys: `first` is the element of row lane / 4 in column 8 n, `row` elements lie
// between rows. Two lanes hold four keys of two rows: each draws for one row.
PYCKPT_DEVICE unsigned kept_by_columns(const DropoutRule& rule, int64_t first, int64_t row) {
  const int lane = int(threadIdx.x) % 32, odd = lane % 2;
  const unsigned mine = kept_four(rule, first + odd * 8 * row + lane % 4 / 2 * 4), other = __shfl_xor_sync(0xffffffffu, mine, 1);
  const unsigned low = (odd ? other : mine) >> 2 * odd & 3, high = (odd ? mine : other) >> 2 * odd & 3;
  return low | high << 2;
}
// The same where rows are keys: `first` is the element of key 16 m for query lane % 4 * 2 of the 8, `query` elements lie between
// queries. Four lanes hold four keys, and four more, of two queries: each draws one of these four.
PYCKPT_DEVICE unsigned kept_by_rows(const DropoutRule& rule, int64_t first, int64_t query) {
  const int g = int(threadIdx.x) % 32 / 4, part = g % 4;
  unsigned four = kept_four(rule, first + part % 2 * query + part / 2 * 8 + g / 4 * 4) << 4 * part;
  four |= __shfl_xor_sync(0xffffffffu, four, 4);
  four |= __shfl_xor_sync(0xffffffffu, four, 8);
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) bits |= (four >> (4 * i + part) & 1) << i;
  return bits;
}

// Over the four lanes that share a row of a product's result.
PYCKPT_DEVICE float row_maximum(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
PYCKPT_DEVICE float row_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// The rows that a block has, of one head.
struct Place {
  int64_t head, batch, of_all, first;  // of_all: the head, counted through the batch
};
PYCKPT_DEVICE Place place_of(int64_t blocks, int64_t heads, int rows, bool last_first) {
  const Division part = divide(blockIdx.x, blocks), head = divide(part.quotient, heads);
  return {head.remainder, head.quotient, part.quotient, (last_first ? blocks - 1 - part.remainder : part.remainder) * rows};
}

// Of a tile of scores, how many of its keys a query sees; both counted from the tile's first. None if negative.
struct Limits {
  int diagonal, end;
  PYCKPT_MEMBER int seen(int query) const { return min(diagonal + query, end); }
};
PYCKPT_DEVICE int clamped(int64_t x) {
  constexpr int kFar = 1 << 20;  // beyond any tile
  return x < -kFar ? -kFar : x > kFar ? kFar : int(x);
}
template <class T>
PYCKPT_DEVICE Limits limits_of(const AttentionCall<T>& a, int64_t query, int64_t key) {
  return {clamped(query + a.reach + 1 - key), clamped(a.seen_keys - key)};
}

template <class T>
Operand<T> operand(const HeadsView& view) {
  return {static_cast<T*>(view.data), view.batch, view.head, view.row};
}

template <class T>
AttentionCall<T> typed(const AttentionArguments& a) {
  AttentionCall<T> call;
  call.q = operand<const T>(a.q);
  call.k = operand<const T>(a.k);
  call.v = operand<const T>(a.v);
  call.heads = a.heads;
  call.kv_heads = a.kv_heads;
  call.queries = a.queries;
  call.keys = a.keys;
  call.reach = a.reach;
  call.first_query = a.reach < 0 ? -a.reach : 0;
  const int64_t seen = a.queries + a.reach;
  call.seen_keys = seen < 0 ? 0 : smaller(seen, a.keys);
  call.scale = float(a.scale);
  call.scale2 = float(a.scale * 1.4426950408889634);
  call.rule = dropout_rule(a.dropout_p, 0);
  call.seed = a.seed;
  call.padded = divide_up(a.queries, kRowStep) * kRowStep;
  return call;
}

// run(type, width, whether there is dropout), all constants, with what the kernels are compiled for.
template <class Run>
void with_attention(const AttentionArguments& a, const Run& run) {
  const auto with_dropout = [&](auto type, auto width) {
    a.seed ? run(type, width, std::true_type{}) : run(type, width, std::false_type{});
  };
  const auto with_width = [&](auto type) {
    if (a.width == 64) return with_dropout(type, std::integral_constant<int, 64>{});
    if (a.width == 128) return with_dropout(type, std::integral_constant<int, 128>{});
    throw std::invalid_argument("attention on CUDA: no kernel for width " + std::to_string(a.width));
  };
  if (a.dtype == kBFloat16) return with_width(Type<__nv_bfloat16>{});
  if (a.dtype == kFloat16) return with_width(Type<__half>{});
  throw std::invalid_argument("attention on CUDA: no kernel for dtype " + std::to_string(a.dtype));
}

}  // namespace cuda
}  // namespace pyckpt
