// Edges and triangles of a graph, on CPU. Shapes: N nodes, M entries, E edges, T triangles.
//
// Edges u < v are in lexicographic order, so that those of one u, its row, lie together with their v ascending; the
// triangles i < j < k of an edge (i, j) are what the rest of i's row has in common with j's row. Found edge by edge,
// triangles come in lexicographic order, whatever the number of threads.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <tuple>
#include <vector>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Numbers = std::vector<int64_t>;

constexpr int64_t kRows = 1024;      // that are worth a thread
constexpr int64_t kBlock = 2048;     // edges whose triangles are gathered at a time
constexpr int64_t kFarLonger = 16;   // times as long: then searched, not merged

Tensor whole(const Tensor& x, int64_t rows, const char* what) {
  STD_TORCH_CHECK(x.dim() == 2 && x.size(0) == rows && x.scalar_type() == ScalarType::Long, what);
  return torch::stable::contiguous(x);
}

const int64_t* begin_of(const Tensor& x) { return static_cast<const int64_t*>(x.const_data_ptr()); }
int64_t* begin_of_new(const Tensor& x) { return static_cast<int64_t*>(x.mutable_data_ptr()); }

// Where each group begins, from its size one place later.
template <typename T>
void accumulate(T* counts, int64_t size) {
  for (int64_t i = 1; i < size; ++i) counts[i] += counts[i - 1];
}

// The upper ends of the edges of each lower end, with repetitions; where each row begins.
std::tuple<Numbers, Numbers> rows_of_entries(const Tensor& edge_index, int64_t num_nodes) {
  const int64_t entries = edge_index.size(1);
  const int64_t *from = begin_of(edge_index), *to = from + entries;
  Numbers begins(num_nodes + 2, 0);
  for (int64_t m = 0; m < entries; ++m) {
    const int64_t low = std::min(from[m], to[m]), high = std::max(from[m], to[m]);
    STD_TORCH_CHECK(low >= 0 && high < num_nodes, "edge_index must hold nodes from 0 to num_nodes - 1");
    if (low != high) ++begins[low + 2];
  }
  accumulate(begins.data(), num_nodes + 2);
  Numbers ends(begins[num_nodes + 1]);
  for (int64_t m = 0; m < entries; ++m)
    if (from[m] != to[m]) ends[begins[std::min(from[m], to[m]) + 1]++] = std::max(from[m], to[m]);
  return {std::move(begins), std::move(ends)};  // begins[u + 1] has gone on to where row u + 1 begins
}

// edge (2, E), rowptr (N + 1,), col and edge_of (2 E,) as in Triples.
std::tuple<Tensor, Tensor, Tensor, Tensor> simple_graph(const Tensor& given, int64_t num_nodes) {
  const Tensor edge_index = whole(given, 2, "edge_index must be (2, M) int64");
  STD_TORCH_CHECK(num_nodes >= 0, "num_nodes must be 0 or more");
  auto [begins, ends] = rows_of_entries(edge_index, num_nodes);
  Numbers first(num_nodes + 1, 0);  // edge of each row
  torch::stable::parallel_for(0, num_nodes, kRows, [&, &begins = begins, &ends = ends](int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; ++u) {
      const auto row = ends.begin() + begins[u], stop = ends.begin() + begins[u + 1];
      std::sort(row, stop);
      first[u + 1] = std::unique(row, stop) - row;
    }
  });
  accumulate(first.data(), num_nodes + 1);
  const int64_t edges = first[num_nodes];
  const auto fresh = [&](std::initializer_list<int64_t> sizes) { return torch::stable::new_empty(edge_index, sizes); };
  Tensor edge = fresh({2, edges}), rowptr = fresh({num_nodes + 1});
  Tensor col = fresh({2 * edges}), edge_of = fresh({2 * edges});
  int64_t *u_of = begin_of_new(edge), *v_of = u_of + edges, *row_begins = begin_of_new(rowptr);
  int64_t *cols = begin_of_new(col), *edges_of = begin_of_new(edge_of);
  torch::stable::parallel_for(0, num_nodes, kRows, [&, &begins = begins, &ends = ends](int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; ++u) {
      std::fill(u_of + first[u], u_of + first[u + 1], u);
      std::copy_n(ends.begin() + begins[u], first[u + 1] - first[u], v_of + first[u]);
    }
  });
  std::fill(row_begins, row_begins + num_nodes + 1, 0);
  for (int64_t e = 0; e < edges; ++e) ++row_begins[v_of[e] + 1];
  accumulate(row_begins, num_nodes + 1);
  for (int64_t u = 0; u <= num_nodes; ++u) row_begins[u] += first[u];
  Numbers next(row_begins, row_begins + num_nodes);  // place for a lower neighbour
  for (int64_t e = 0; e < edges; ++e) {
    const int64_t place = next[v_of[e]]++;
    cols[place] = u_of[e], edges_of[place] = e;
  }
  torch::stable::parallel_for(0, num_nodes, kRows, [&](int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; ++u) {
      int64_t place = next[u];  // after the lower ones
      for (int64_t e = first[u]; e < first[u + 1]; ++e, ++place) cols[place] = v_of[e], edges_of[place] = e;
    }
  });
  return {edge, rowptr, col, edge_of};
}

// Calls found(a, b) where ends[a] == ends[b], a and b of two ranges of ends that ascend.
template <typename F>
void intersect(const int64_t* ends, int64_t a, int64_t a_end, int64_t b, int64_t b_end, const F& found) {
  const int64_t in_a = a_end - a, in_b = b_end - b;
  if (in_a > kFarLonger * in_b) {
    for (; b < b_end; ++b) {
      a = std::lower_bound(ends + a, ends + a_end, ends[b]) - ends;
      if (a == a_end) return;
      if (ends[a] == ends[b]) found(a, b);
    }
  } else if (in_b > kFarLonger * in_a) {
    for (; a < a_end; ++a) {
      b = std::lower_bound(ends + b, ends + b_end, ends[a]) - ends;
      if (b == b_end) return;
      if (ends[a] == ends[b]) found(a, b);
    }
  } else {
    while (a < a_end && b < b_end) {
      const int64_t left = ends[a], right = ends[b];
      if (left == right) found(a, b);
      a += left <= right, b += right <= left;
    }
  }
}

// triangle and side, (3, T) each, as in Triples; of edge (2, E), which is in order.
std::tuple<Tensor, Tensor> find_triangles(const Tensor& given, int64_t num_nodes) {
  const Tensor edge = whole(given, 2, "edge must be (2, E) int64");
  STD_TORCH_CHECK(num_nodes >= 0, "num_nodes must be 0 or more");
  const int64_t edges = edge.size(1), blocks = (edges + kBlock - 1) / kBlock;
  const int64_t *u_of = begin_of(edge), *v_of = u_of + edges;
  Numbers first(num_nodes + 1, 0);  // edge of each row
  for (int64_t e = 0; e < edges; ++e) {
    STD_TORCH_CHECK(0 <= u_of[e] && u_of[e] < v_of[e] && v_of[e] < num_nodes && (e == 0 || u_of[e - 1] <= u_of[e]),
                    "edge must list nodes u < v < num_nodes, in lexicographic order");
    ++first[u_of[e] + 1];
  }
  accumulate(first.data(), num_nodes + 1);
  std::vector<Numbers> found(blocks);  // edges (i, j), (i, k), (j, k) of each triangle, block by block
  torch::stable::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      Numbers& here = found[block];
      for (int64_t e = block * kBlock; e < std::min(edges, (block + 1) * kBlock); ++e)
        intersect(v_of, e + 1, first[u_of[e] + 1], first[v_of[e]], first[v_of[e] + 1],
                  [&](int64_t a, int64_t b) { here.insert(here.end(), {e, a, b}); });
    }
  });
  Numbers before(blocks + 1, 0);
  for (int64_t block = 0; block < blocks; ++block) before[block + 1] = before[block] + found[block].size() / 3;
  const int64_t triangles = before[blocks];
  Tensor triangle = torch::stable::new_empty(edge, {3, triangles}), side = torch::stable::empty_like(triangle);
  int64_t *corners = begin_of_new(triangle), *sides = begin_of_new(side);
  torch::stable::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const Numbers& here = found[block];
      for (int64_t t = before[block], n = 0; t < before[block + 1]; ++t, n += 3) {
        const int64_t ij = here[n], ik = here[n + 1], jk = here[n + 2];
        corners[t] = u_of[ij], corners[triangles + t] = v_of[ij], corners[2 * triangles + t] = v_of[ik];
        sides[t] = jk, sides[triangles + t] = ik, sides[2 * triangles + t] = ij;
      }
    }
  });
  return {triangle, side};
}

// num_triangles (N,), third_rowptr (E + 1,), third (3 T,) and triangle_edge (S,) as in Triples.
std::tuple<Tensor, Tensor, Tensor, Tensor> group_triangles(const Tensor& given, const Tensor& given_side,
                                                           int64_t num_nodes, int64_t num_edges) {
  const Tensor triangle = whole(given, 3, "triangle must be (3, T) int64");
  const Tensor side = whole(given_side, 3, "side must be (3, T) int64");
  STD_TORCH_CHECK(triangle.size(1) == side.size(1), "triangle and side must be of one size");
  STD_TORCH_CHECK(num_nodes >= 0, "num_nodes must be 0 or more");
  STD_TORCH_CHECK(num_edges >= 0, "num_edges must be 0 or more");
  const int64_t places = 3 * side.size(1);
  const int64_t *corners = begin_of(triangle), *sides = begin_of(side);
  Tensor num_triangles = torch::stable::new_zeros(triangle, {num_nodes});
  Tensor rowptr = torch::stable::new_zeros(triangle, {num_edges + 1});
  Tensor third = torch::stable::new_empty(triangle, {places});
  int64_t *of_node = begin_of_new(num_triangles), *begins = begin_of_new(rowptr), *thirds = begin_of_new(third);
  for (int64_t p = 0; p < places; ++p) {
    STD_TORCH_CHECK(0 <= corners[p] && corners[p] < num_nodes && 0 <= sides[p] && sides[p] < num_edges,
                    "triangle and side must be of nodes and edges of the graph");
    ++of_node[corners[p]], ++begins[sides[p] + 1];
  }
  const int64_t used = num_edges - std::count(begins + 1, begins + num_edges + 1, 0);
  accumulate(begins, num_edges + 1);
  Numbers next(begins, begins + num_edges);
  for (int64_t p = 0; p < places; ++p) thirds[next[sides[p]]++] = corners[p];
  Tensor triangle_edge = torch::stable::new_empty(triangle, {used});
  int64_t* listed = begin_of_new(triangle_edge);
  for (int64_t e = 0; e < num_edges; ++e)
    if (begins[e + 1] > begins[e]) *listed++ = e;
  return {num_triangles, rowptr, third, triangle_edge};
}

// Adds x_j y_k + x_k y_j, or x_j x_k where x is y, to row i of out for each corner i of the triangles {i, j, k}, in the
// columns from begin to end.
template <typename T, bool kSame>
void add_triangles(const int64_t* corners, int64_t triangles, int64_t channels, const T* x, const T* y, T* out,
                   int64_t begin, int64_t end) {
  for (int64_t t = 0; t < triangles; ++t) {
    const int64_t i = corners[t] * channels, j = corners[triangles + t] * channels;
    const int64_t k = corners[2 * triangles + t] * channels;
    const T *x_i = x + i, *x_j = x + j, *x_k = x + k, *y_i = y + i, *y_j = y + j, *y_k = y + k;
    T *out_i = out + i, *out_j = out + j, *out_k = out + k;
#pragma GCC ivdep
    for (int64_t r = begin; r < end; ++r) {
      if constexpr (kSame) {
        out_i[r] += x_j[r] * x_k[r], out_j[r] += x_i[r] * x_k[r], out_k[r] += x_i[r] * x_j[r];
      } else {
        out_i[r] += x_j[r] * y_k[r] + x_k[r] * y_j[r];
        out_j[r] += x_i[r] * y_k[r] + x_k[r] * y_i[r];
        out_k[r] += x_i[r] * y_j[r] + x_j[r] * y_i[r];
      }
    }
  }
}

template <typename T>
void add_triangles_to(Tensor& out, const Tensor& triangle, const Tensor& x, const Tensor& y, bool same) {
  const int64_t channels = x.size(1), triangles = triangle.size(1);
  const auto add = same ? &add_triangles<T, true> : &add_triangles<T, false>;
  const int64_t slab = 64 / sizeof(T);  // columns of a thread: whole cache lines, which no other thread writes
  torch::stable::parallel_for(0, (channels + slab - 1) / slab, 1, [&](int64_t begin, int64_t end) {
    add(begin_of(triangle), triangles, channels, x.const_data_ptr<T>(), y.const_data_ptr<T>(),
        out.mutable_data_ptr<T>(), begin * slab, std::min(end * slab, channels));
  });
}

// (N, R): the sums over triangles of each node, of x and y (N, R) float32 or float64, or of x alone.
Tensor triangle_products(const Tensor& given, const std::optional<Tensor>& other, const Tensor& corners) {
  const Tensor x = torch::stable::contiguous(given), y = other ? torch::stable::contiguous(*other) : x;
  const Tensor triangle = whole(corners, 3, "triangle must be (3, T) int64");
  const ScalarType type = x.scalar_type();
  STD_TORCH_CHECK(x.dim() == 2 && y.dim() == 2 && x.size(0) == y.size(0) && x.size(1) == y.size(1) &&
                      y.scalar_type() == type && (type == ScalarType::Float || type == ScalarType::Double),
                  "x and y must be (N, R) float32 or float64, alike");
  const int64_t *nodes = begin_of(triangle), places = triangle.numel(), num_nodes = x.size(0);
  STD_TORCH_CHECK(std::all_of(nodes, nodes + places, [&](int64_t node) { return 0 <= node && node < num_nodes; }),
                  "triangle must be of nodes of the graph");
  Tensor out = torch::stable::new_zeros(x, {num_nodes, x.size(1)});
  (type == ScalarType::Float ? add_triangles_to<float> : add_triangles_to<double>)(out, triangle, x, y, !other);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lightning_accel_native, m) {
  m.def("simple_graph(Tensor edge_index, int num_nodes) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("find_triangles(Tensor edge, int num_nodes) -> (Tensor, Tensor)");
  m.def(
      "group_triangles(Tensor triangle, Tensor side, int num_nodes, int num_edges) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  m.def("triangle_products(Tensor x, Tensor? y, Tensor triangle) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lightning_accel_native, CPU, m) {
  m.impl("simple_graph", TORCH_BOX(&simple_graph));
  m.impl("find_triangles", TORCH_BOX(&find_triangles));
  m.impl("group_triangles", TORCH_BOX(&group_triangles));
  m.impl("triangle_products", TORCH_BOX(&triangle_products));
}
