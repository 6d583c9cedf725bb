// Sums over the triples of each node, and their gradients, on the CPU, in float32 and float64.
// Shapes: N nodes, E edges, T triangles, F features, R channels.
//
// Each node gathers from its neighbours and triangles, so that no sum is shared by threads, and results do not depend on
// their number. Nothing is stored per neighbour or triangle but where the triangles of a node, and of an edge, are.
// Matrices of `T` may be summed in a wider `Sum`, where sums over all paths and over those in triangles nearly cancel.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;
using Numbers = std::vector<int64_t>;

constexpr int64_t kGrain = 256;  // nodes or edges that are worth a thread

const int64_t* numbers(const Tensor& x, int64_t size, const char* name) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Long && x.is_contiguous() && x.numel() == size, name,
                  " must be contiguous int64, of the graph's size");
  return static_cast<const int64_t*>(x.const_data_ptr());
}

// A triangle seen from one of its nodes, r, or from the edge st.
struct Corner {
  int64_t r, s, t;     // nodes
  int64_t rs, rt, st;  // edges
};

// Lists of places in a (3, T) tensor, by its values.
struct Lists {
  Numbers begins, places;

  Lists(const int64_t* values, int64_t num_values, int64_t num_lists) : begins(num_lists + 1, 0), places(num_values) {
    for (int64_t p = 0; p < num_values; ++p) ++begins[values[p] + 1];
    for (int64_t i = 0; i < num_lists; ++i) begins[i + 1] += begins[i];
    Numbers next(begins.begin(), begins.end() - 1);
    for (int64_t p = 0; p < num_values; ++p) places[next[values[p]]++] = p;
  }
};

struct Graph {
  int64_t nodes, edges, triangles;
  const int64_t *rowptr, *col, *edge_of, *edge, *triangle, *side;

  Graph(const Tensor& rows, const Tensor& cols, const Tensor& edges_of, const Tensor& ends, const Tensor& corners,
        const Tensor& sides)
      : nodes(rows.numel() - 1), edges(cols.numel() / 2), triangles(corners.numel() / 3),
        rowptr(numbers(rows, nodes + 1, "rowptr")), col(numbers(cols, 2 * edges, "col")),
        edge_of(numbers(edges_of, 2 * edges, "edge_of")), edge(numbers(ends, 2 * edges, "edge")),
        triangle(numbers(corners, 3 * triangles, "triangle")), side(numbers(sides, 3 * triangles, "side")) {}

  Corner at(int64_t place) const {
    const int64_t row = place / triangles, column = place - row * triangles;
    const int64_t second = (row + 1) % 3 * triangles + column, third = (row + 2) % 3 * triangles + column;
    // a side lies opposite the node in its row
    return {triangle[place], triangle[second], triangle[third], side[third], side[second], side[place]};
  }
};

// Rows of a matrix.
template <typename T>
struct Matrix {
  T* data;
  int64_t stride;
  T* operator[](int64_t i) const { return data + i * stride; }
};

template <typename T>
Matrix<const T> read(const Tensor& x, int64_t rows, int64_t columns, const Tensor& like) {
  STD_TORCH_CHECK(x.dim() == 2 && x.size(0) == rows && x.size(1) == columns && x.is_contiguous() &&
                      x.scalar_type() == like.scalar_type(),
                  "matrices must be contiguous, of one dtype, with a row for each node or edge");
  return {static_cast<const T*>(x.const_data_ptr()), columns};
}

template <typename T>
Matrix<T> write(const Tensor& x) {
  return {static_cast<T*>(x.mutable_data_ptr()), x.size(1)};
}

// Where the parts of a row of the output begin: x and its neighbours' sum, b, and the sums.
struct Parts {
  int64_t b, triangle, centre, leaf, around, columns;
  Parts(int64_t features, int64_t rank, bool weighted)
      : b(features), triangle(b + rank), centre(triangle + rank), leaf(centre + rank), around(leaf + rank),
        columns(weighted ? around + rank : around) {}
};

// Weights of edges, which are 1 where there are none.
template <typename T, bool kWeighted>
struct Weights {
  Matrix<const T> rows;
  struct Row {
    const T* data;
    T operator[](int64_t r) const {
      if constexpr (kWeighted) return data[r];
      return T(1);
    }
  };
  Row operator[](int64_t e) const {
    if constexpr (kWeighted) return {rows[e]};
    return {nullptr};
  }
};

// Loads the row of a neighbour some entries ahead, which no processor foresees, into the cache.
template <typename T>
inline void load_ahead(const Graph& graph, int64_t entry, Matrix<T> rows, int64_t columns) {
  constexpr int64_t kAhead = 8, kLine = 64 / sizeof(T);
  if (entry + kAhead >= 2 * graph.edges) return;
  const auto* row = rows[graph.col[entry + kAhead]];
  for (int64_t i = 0; i < columns; i += kLine) __builtin_prefetch(row + i);
}

template <typename T, typename Sum>
void round_to(const Sum* from, int64_t n, T* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<T>(from[i]);
}

template <typename T>
void add(const T* from, int64_t n, T* to) {
  for (int64_t i = 0; i < n; ++i) to[i] += from[i];
}

template <typename T, typename Sum, bool kWeighted>
void sum(const Graph& graph, int64_t features, int64_t rank, Matrix<const T> x, Matrix<const T> maps,
         Weights<T, kWeighted> weight, Matrix<T> out, Matrix<Sum> saved, Matrix<Sum> steps) {
  const Parts parts(features, rank, kWeighted);
  const Lists corners(graph.triangle, 3 * graph.triangles, graph.nodes);
  torch::stable::parallel_for(0, graph.nodes, kGrain, [&](int64_t from, int64_t until) {
    std::vector<Sum> sums(4 * rank);
    Sum *squares = sums.data(), *triangle = squares + rank, *closed = triangle + rank, *centre = closed + rank;
    for (int64_t i = from; i < until; ++i) {
      Sum *around = saved[i], *around_c = around + rank, *step = steps[i], *path = step + rank;
      std::fill(sums.begin(), sums.end(), Sum(0));
      std::fill_n(around, 2 * rank, Sum(0));
      std::fill_n(path, rank, Sum(0));
      T* row = out[i];
      std::copy_n(x[i], features, row);
      for (int64_t n = graph.rowptr[i]; n < graph.rowptr[i + 1]; ++n) {
        const T *b = maps[graph.col[n]], *c = b + rank;
        const auto w = weight[graph.edge_of[n]];
        load_ahead(graph, n, x, features);
        load_ahead(graph, n, maps, 2 * rank);
        add(x[graph.col[n]], features, row);
        for (int64_t r = 0; r < rank; ++r) {
          const Sum factor = w[r], term = factor * b[r];
          around[r] += term;
          squares[r] += term * term;
          around_c[r] += factor * factor * c[r];
        }
      }
      for (int64_t n = corners.begins[i]; n < corners.begins[i + 1]; ++n) {
        const Corner at = graph.at(corners.places[n]);
        const T *b_s = maps[at.s], *b_t = maps[at.t], *c_s = b_s + rank, *c_t = b_t + rank;
        const auto rs = weight[at.rs], rt = weight[at.rt], st = weight[at.st];
        for (int64_t r = 0; r < rank; ++r) {
          const Sum w_s = rs[r], w_t = rt[r], w_far = st[r], own_s = w_s * b_s[r], own_t = w_t * b_t[r];
          const Sum both = own_s * own_t;
          closed[r] += both;
          triangle[r] += both * w_far;
          path[r] += w_far * (w_s * c_s[r] * b_t[r] + w_t * c_t[r] * b_s[r]);
        }
      }
      const T* c = maps[i] + rank;
      for (int64_t r = 0; r < rank; ++r) {
        centre[r] = (around[r] * around[r] - squares[r]) / 2 - closed[r];
        step[r] = c[r] * around[r];
      }
      std::copy_n(maps[i], rank, row + parts.b);
      round_to(triangle, rank, row + parts.triangle);
      round_to(centre, rank, row + parts.centre);
      if constexpr (kWeighted) round_to(around, rank, row + parts.around);
    }
  });
  torch::stable::parallel_for(0, graph.nodes, kGrain, [&](int64_t from, int64_t until) {
    std::vector<Sum> walks(rank);
    for (int64_t i = from; i < until; ++i) {
      std::fill(walks.begin(), walks.end(), Sum(0));
      for (int64_t n = graph.rowptr[i]; n < graph.rowptr[i + 1]; ++n) {
        const Sum* step = steps[graph.col[n]];
        const auto w = weight[graph.edge_of[n]];
        load_ahead(graph, n, steps, rank);
        for (int64_t r = 0; r < rank; ++r) walks[r] += step[r] * w[r];
      }
      const T* b = maps[i];
      const Sum *around_c = saved[i] + rank, *path = steps[i] + rank;
      for (int64_t r = 0; r < rank; ++r) walks[r] = (walks[r] - b[r] * around_c[r]) - path[r];
      round_to(walks.data(), rank, out[i] + parts.leaf);
    }
  });
}

// What gradients are computed of, and where they go; d_weight is not written without weights.
template <typename T, typename Sum, bool kWeighted>
struct Backward {
  const Graph& graph;
  const int64_t features, rank;
  const Parts parts;
  Matrix<const T> maps;
  Weights<T, kWeighted> weight;
  Matrix<const Sum> saved;
  Matrix<const T> grad;
  Matrix<T> d_x, d_maps, d_weight;
  Matrix<Sum> d_sums, d_around;  // d_sums: of maps

  const T* of_triangle(int64_t i) const { return grad[i] + parts.triangle; }
  const T* of_centre(int64_t i) const { return grad[i] + parts.centre; }
  const T* of_leaf(int64_t i) const { return grad[i] + parts.leaf; }

  void run() const {
    const Lists corners(graph.triangle, 3 * graph.triangles, graph.nodes);
    torch::stable::parallel_for(0, graph.nodes, kGrain, [&](int64_t from, int64_t until) {
      std::vector<Sum> sums(3 * rank);
      for (int64_t j = from; j < until; ++j) {
        gather(j, sums);
        for (int64_t n = corners.begins[j]; n < corners.begins[j + 1]; ++n)
          gather_triangle(graph.at(corners.places[n]), d_sums[j]);
      }
    });
    torch::stable::parallel_for(0, graph.nodes, kGrain, [&](int64_t from, int64_t until) {
      for (int64_t j = from; j < until; ++j) {
        Sum* d_b = d_sums[j];
        for (int64_t n = graph.rowptr[j]; n < graph.rowptr[j + 1]; ++n) {
          const Sum* of_around = d_around[graph.col[n]];
          const auto w = weight[graph.edge_of[n]];
          load_ahead(graph, n, d_around, rank);
          for (int64_t r = 0; r < rank; ++r) d_b[r] += w[r] * of_around[r];
        }
        round_to(d_b, 2 * rank, d_maps[j]);
      }
    });
    if constexpr (kWeighted) {
      const Lists thirds(graph.side, 3 * graph.triangles, graph.edges);
      torch::stable::parallel_for(0, graph.edges, kGrain, [&](int64_t from, int64_t until) {
        std::vector<Sum> sums(rank);
        for (int64_t e = from; e < until; ++e) {
          std::fill(sums.begin(), sums.end(), Sum(0));
          const int64_t u = graph.edge[e], v = graph.edge[graph.edges + e];
          gather_edge(e, u, v, sums.data());
          gather_edge(e, v, u, sums.data());
          for (int64_t n = thirds.begins[e]; n < thirds.begins[e + 1]; ++n)
            gather_opposite(graph.at(thirds.places[n]), sums.data());
          round_to(sums.data(), rank, d_weight[e]);
        }
      });
    }
  }

  // From the neighbours of j: all of d_x, and d_maps but for triangles and what d_around gives.
  void gather(int64_t j, std::vector<Sum>& sums) const {
    std::fill(sums.begin(), sums.end(), Sum(0));
    Sum *leaves = sums.data(), *centres = leaves + rank, *returns = centres + rank;
    std::copy_n(grad[j], features, d_x[j]);
    for (int64_t n = graph.rowptr[j]; n < graph.rowptr[j + 1]; ++n) {
      const int64_t i = graph.col[n];
      const auto w = weight[graph.edge_of[n]];
      const T *leaf = of_leaf(i), *centre = of_centre(i), *b = maps[i];
      load_ahead(graph, n, grad, features);
      load_ahead(graph, n, Matrix<const T>{grad.data + parts.centre, grad.stride}, 2 * rank);
      load_ahead(graph, n, maps, rank);
      add(grad[i], features, d_x[j]);
      for (int64_t r = 0; r < rank; ++r) {
        const Sum factor = w[r], square = factor * factor;
        leaves[r] += factor * leaf[r];
        centres[r] += square * centre[r];
        returns[r] += square * leaf[r] * b[r];
      }
    }
    const T *b = maps[j], *c = b + rank;
    const Sum *around = saved[j], *around_c = around + rank;
    const T *g_b = grad[j] + parts.b, *centre = of_centre(j), *leaf = of_leaf(j), *g_around = grad[j] + parts.around;
    Sum *d_b = d_sums[j], *d_c = d_b + rank, *of_around = d_around[j];
    for (int64_t r = 0; r < rank; ++r) {
      d_b[r] = g_b[r] - b[r] * centres[r] - leaf[r] * around_c[r];
      d_c[r] = around[r] * leaves[r] - returns[r];
      of_around[r] = centre[r] * around[r] + c[r] * leaves[r];
      if constexpr (kWeighted) of_around[r] += g_around[r];
    }
  }

  // What the terms of s and t in a triangle give to the maps of r.
  void gather_triangle(const Corner& at, Sum* d_b) const {
    const T *b_s = maps[at.s], *b_t = maps[at.t], *c_s = b_s + rank, *c_t = b_t + rank;
    const T *triangle_s = of_triangle(at.s), *triangle_t = of_triangle(at.t);
    const T *centre_s = of_centre(at.s), *centre_t = of_centre(at.t);
    const T *leaf_s = of_leaf(at.s), *leaf_t = of_leaf(at.t);
    const auto rs = weight[at.rs], rt = weight[at.rt], st = weight[at.st];
    Sum* d_c = d_b + rank;
    for (int64_t r = 0; r < rank; ++r) {
      const Sum w_s = rs[r], w_t = rt[r], near = w_s * w_t, through_s = w_s * st[r], through_t = w_t * st[r];
      d_b[r] += b_t[r] * through_s * (triangle_s[r] * w_t - centre_s[r]) - leaf_s[r] * through_t * c_t[r] +
                b_s[r] * through_t * (triangle_t[r] * w_s - centre_t[r]) - leaf_t[r] * through_s * c_s[r];
      d_c[r] -= near * leaf_s[r] * b_t[r] + near * leaf_t[r] * b_s[r];
    }
  }

  // What the terms of i with its neighbour j give to the weight of their edge.
  void gather_edge(int64_t e, int64_t i, int64_t j, Sum* d_w) const {
    const T *b_i = maps[i], *b_j = maps[j], *c_j = b_j + rank, *centre = of_centre(i), *leaf = of_leaf(i);
    const Sum *around_j = saved[j], *of_around = d_around[i];
    const auto w = weight[e];
    for (int64_t r = 0; r < rank; ++r) {
      const Sum factor = w[r], b = b_j[r];
      d_w[r] += of_around[r] * b + (around_j[r] - 2 * factor * b_i[r]) * leaf[r] * c_j[r] - factor * b * b * centre[r];
    }
  }

  // What the terms of a triangle give to the weight of the edge st.
  void gather_opposite(const Corner& at, Sum* d_w) const {
    const T *b_r = maps[at.r], *b_s = maps[at.s], *b_t = maps[at.t], *c_s = b_s + rank, *c_t = b_t + rank;
    const T *triangle_r = of_triangle(at.r), *triangle_s = of_triangle(at.s), *triangle_t = of_triangle(at.t);
    const T *centre_s = of_centre(at.s), *centre_t = of_centre(at.t);
    const T *leaf_r = of_leaf(at.r), *leaf_s = of_leaf(at.s), *leaf_t = of_leaf(at.t);
    const auto rs = weight[at.rs], rt = weight[at.rt];
    for (int64_t r = 0; r < rank; ++r) {
      const Sum w_s = rs[r], w_t = rt[r], r_b = b_r[r], s_b = b_s[r], t_b = b_t[r], s_c = c_s[r], t_c = c_t[r];
      const Sum all = triangle_r[r] * s_b * t_b + triangle_s[r] * r_b * t_b + triangle_t[r] * r_b * s_b;
      d_w[r] += w_s * w_t * all - leaf_r[r] * (w_s * s_c * t_b + w_t * t_c * s_b) -
                r_b * (w_s * (centre_s[r] * t_b + leaf_t[r] * s_c) + w_t * (centre_t[r] * s_b + leaf_s[r] * t_c));
    }
  }
};

struct Sizes {
  int64_t features, rank;
  Sizes(const Tensor& x, const Tensor& maps) : features(x.size(1)), rank(maps.size(1) / 2) {
    STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::Double,
                    "x must be float32 or float64");
  }
};

template <typename T, bool kWeighted>
Weights<T, kWeighted> weights_of(const Maybe& weight, const Graph& graph, const Sizes& sizes, const Tensor& like) {
  if constexpr (kWeighted) return {read<T>(*weight, graph.edges, sizes.rank, like)};
  return {};
}

// Calls run with a number of each dtype, of matrices and of sums, and whether there are weights as std::bool_constant.
template <typename F>
void dispatch(const Tensor& x, const Maybe& weight, bool wide, const F& run) {
  const auto with = [&](auto kind, auto sum) {
    weight ? run(kind, sum, std::true_type()) : run(kind, sum, std::false_type());
  };
  if (x.scalar_type() == ScalarType::Double) return with(double(), double());
  wide ? with(float(), double()) : with(float(), float());
}

ScalarType sum_type(const Tensor& x, bool wide) { return wide ? ScalarType::Double : x.scalar_type(); }

// The rows (N, F + 4 R), or (N, F + 5 R) with weights: x and the sum of its neighbours, b, and the sums over the
// triangles, over the wedges of which the node is the centre, over those of which it is an end, and over the neighbours
// of w b. Then what the backward pass needs (N, 2 R), float64 if sums are `wide`.
std::tuple<Tensor, Tensor> rooted_triples(const Tensor& x, const Tensor& maps, Maybe weight, bool wide,
                                          const Tensor& rowptr, const Tensor& col, const Tensor& edge_of,
                                          const Tensor& edge, const Tensor& triangle, const Tensor& side) {
  const Graph graph(rowptr, col, edge_of, edge, triangle, side);
  const Sizes sizes(x, maps);
  const Parts parts(sizes.features, sizes.rank, weight.has_value());
  Tensor out = torch::stable::new_empty(x, {graph.nodes, parts.columns});
  Tensor saved = torch::stable::new_empty(x, {graph.nodes, 2 * sizes.rank}, sum_type(x, wide));
  Tensor steps = torch::stable::empty_like(saved);  // of paths: c times the sum of neighbours' b; and those in triangles
  dispatch(x, weight, wide, [&](auto kind, auto wider, auto is_weighted) {
    using T = decltype(kind);
    using Sum = decltype(wider);
    constexpr bool kWeighted = decltype(is_weighted)::value;
    sum<T, Sum, kWeighted>(graph, sizes.features, sizes.rank, read<T>(x, graph.nodes, sizes.features, x),
                           read<T>(maps, graph.nodes, 2 * sizes.rank, x),
                           weights_of<T, kWeighted>(weight, graph, sizes, x), write<T>(out), write<Sum>(saved),
                           write<Sum>(steps));
  });
  return {out, saved};
}

// Gradients of x, maps and weight (0, R without weights).
std::tuple<Tensor, Tensor, Tensor> rooted_triples_backward(const Tensor& grad, const Tensor& x, const Tensor& maps,
                                                           Maybe weight, bool wide, const Tensor& saved,
                                                           const Tensor& rowptr, const Tensor& col,
                                                           const Tensor& edge_of, const Tensor& edge,
                                                           const Tensor& triangle, const Tensor& side) {
  const Graph graph(rowptr, col, edge_of, edge, triangle, side);
  const Sizes sizes(x, maps);
  const Parts parts(sizes.features, sizes.rank, weight.has_value());
  Tensor d_x = torch::stable::new_empty(x, {graph.nodes, sizes.features});
  Tensor d_maps = torch::stable::new_empty(x, {graph.nodes, 2 * sizes.rank});
  Tensor d_weight = torch::stable::new_empty(x, {weight ? graph.edges : 0, sizes.rank});
  Tensor d_sums = wide ? torch::stable::empty_like(saved) : d_maps;
  Tensor d_around = torch::stable::new_empty(saved, {graph.nodes, sizes.rank});
  STD_TORCH_CHECK(saved.scalar_type() == sum_type(x, wide), "saved sums must be those of the forward pass");
  dispatch(x, weight, wide, [&](auto kind, auto wider, auto is_weighted) {
    using T = decltype(kind);
    using Sum = decltype(wider);
    constexpr bool kWeighted = decltype(is_weighted)::value;
    Backward<T, Sum, kWeighted>{graph,
                                sizes.features,
                                sizes.rank,
                                parts,
                                read<T>(maps, graph.nodes, 2 * sizes.rank, x),
                                weights_of<T, kWeighted>(weight, graph, sizes, x),
                                read<Sum>(saved, graph.nodes, 2 * sizes.rank, saved),
                                read<T>(grad, graph.nodes, parts.columns, x),
                                write<T>(d_x),
                                write<T>(d_maps),
                                write<T>(d_weight),
                                write<Sum>(d_sums),
                                write<Sum>(d_around)}
        .run();
  });
  return {d_x, d_maps, d_weight};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lightning_accel_native, m) {
  m.def(
      "rooted_triples(Tensor x, Tensor maps, Tensor? weight, bool wide, Tensor rowptr, Tensor col, Tensor edge_of, "
      "Tensor edge, Tensor triangle, Tensor side) -> (Tensor, Tensor)");
  m.def(
      "rooted_triples_backward(Tensor grad, Tensor x, Tensor maps, Tensor? weight, bool wide, Tensor saved, "
      "Tensor rowptr, Tensor col, Tensor edge_of, Tensor edge, Tensor triangle, Tensor side) -> (Tensor, Tensor, "
      "Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(lightning_accel_native, CPU, m) {
  m.impl("rooted_triples", TORCH_BOX(&rooted_triples));
  m.impl("rooted_triples_backward", TORCH_BOX(&rooted_triples_backward));
}
