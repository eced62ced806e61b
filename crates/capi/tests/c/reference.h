// Attention in double precision, by its definition, and comparisons. Shared by the tests in C.
#ifndef REFERENCE_H
#define REFERENCE_H

#include "longspan.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(list) (sizeof(list) / sizeof((list)[0]))

#define CHECK(condition)                                                                           \
  do {                                                                                             \
    if (!(condition)) {                                                                            \
      fprintf(stderr, "%s:%d: %s\n  %s\n", __FILE__, __LINE__, #condition, longspan_last_error()); \
      exit(1);                                                                                     \
    }                                                                                              \
  } while (0)

#define OK(call) CHECK((call) == LONGSPAN_STATUS_OK)

// Sizes of a case.
typedef struct {
  int batch, heads, key_heads, queries, keys, dim, value_dim;
} sizes;

// The same numbers each time, about evenly spread over −1 to 1.
static inline float *numbers(size_t count, unsigned seed) {
  float *list = malloc((count ? count : 1) * sizeof(float));
  unsigned state = seed * 2654435761u + 1;
  for (size_t i = 0; i < count; i++) {
    state = state * 1664525u + 1013904223u;
    list[i] = (float)(state >> 8) / 8388608.0f - 1.0f;
  }
  return list;
}

// How often a pair of positions counts.
typedef int (*pairs)(int head, int query, int key);

// Output, log-sum-exp and gradients in double precision.
typedef struct {
  double *out, *lse, *dq, *dk, *dv;
} truth;

static inline truth reference(sizes s, const float *q, const float *k, const float *v, const float *dout,
                              pairs active) {
  size_t rows = (size_t)s.batch * s.heads * s.queries, keys = (size_t)s.batch * s.key_heads * s.keys;
  truth t = {calloc(rows * s.value_dim, 8), calloc(rows, 8), calloc(rows * s.dim, 8),
             calloc(keys * s.dim, 8), calloc(keys * s.value_dim, 8)};
  double *p = malloc(s.keys * sizeof(double)), scale = 1 / sqrt(s.dim);
  for (int b = 0; b < s.batch; b++)
    for (int h = 0; h < s.heads; h++)
      for (int i = 0; i < s.queries; i++) {
        size_t row = ((size_t)b * s.heads + h) * s.queries + i;
        size_t first = ((size_t)b * s.key_heads + h / (s.heads / s.key_heads)) * s.keys;
        double total = 0, delta = 0;
        for (int j = 0; j < s.keys; j++) {
          double score = 0;
          for (int d = 0; d < s.dim; d++) score += (double)q[row * s.dim + d] * k[(first + j) * s.dim + d];
          // Queries are the last positions.
          p[j] = active(h, i + s.keys - s.queries, j) * exp(scale * score);
          total += p[j];
        }
        t.lse[row] = log(total);
        if (total == 0) continue;
        for (int j = 0; j < s.keys; j++) {
          p[j] /= total;
          for (int d = 0; d < s.value_dim; d++)
            t.out[row * s.value_dim + d] += p[j] * v[(first + j) * s.value_dim + d];
        }
        for (int d = 0; d < s.value_dim; d++)
          delta += (double)dout[row * s.value_dim + d] * t.out[row * s.value_dim + d];
        for (int j = 0; j < s.keys; j++) {
          double dp = -delta;
          for (int d = 0; d < s.value_dim; d++) {
            dp += (double)dout[row * s.value_dim + d] * v[(first + j) * s.value_dim + d];
            t.dv[(first + j) * s.value_dim + d] += p[j] * dout[row * s.value_dim + d];
          }
          for (int d = 0; d < s.dim; d++) {
            t.dq[row * s.dim + d] += scale * p[j] * dp * k[(first + j) * s.dim + d];
            t.dk[(first + j) * s.dim + d] += scale * p[j] * dp * q[row * s.dim + d];
          }
        }
      }
  free(p);
  return t;
}

static inline void free_truth(truth t) {
  free(t.out), free(t.lse), free(t.dq), free(t.dk), free(t.dv);
}

// Whether numbers are those of the truth. Values are below 1, so that sums of f32 are off by some units of
// 2^-24: 64 of them, which is one part in 260,000.
static inline int close_to(const float *list, const double *expected, size_t count) {
  for (size_t i = 0; i < count; i++) {
    if (isinf(expected[i]) ? (double)list[i] != expected[i] : !(fabs(list[i] - expected[i]) <= 64 * 0x1p-24)) {
      fprintf(stderr, "element %zu is %.9g, expected %.9g\n", i, list[i], expected[i]);
      return 0;
    }
  }
  return 1;
}

#endif
