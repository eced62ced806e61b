// A causal window with sinks, forward and backward, from C.
//
//   cc -std=c11 window.c $(pkg-config --cflags --libs longspan) -o window-c
#include <longspan.h>

#include <stdio.h>
#include <stdlib.h>

enum { TOKENS = 301, HEAD_DIM = 16 };

static void check(longspan_status status) {
  if (status != LONGSPAN_STATUS_OK) {
    fprintf(stderr, "%s\n", longspan_last_error());
    exit(1);
  }
}

// The same numbers in every program of this folder.
static longspan_tensor tensor(int seed, int heads) {
  float *values = malloc(sizeof(float) * heads * TOKENS * HEAD_DIM);
  for (int i = 0; i < heads * TOKENS * HEAD_DIM; i++) values[i] = (float)((7 * i + 13 * seed) % 31) / 16 - 0.9375f;
  return longspan_tensor_bhsd(values, LONGSPAN_F32, 1, heads, TOKENS, HEAD_DIM);
}

static double squares(const float *values, int count) {
  double sum = 0;
  for (int i = 0; i < count; i++) sum += (double)values[i] * values[i];
  return sum;
}

int main(void) {
  longspan_shape shape = LONGSPAN_SHAPE_INIT;
  shape.tokens_q = shape.tokens_k = TOKENS;
  longspan_layout *layout;
  check(longspan_layout_compile("causal & (window(64, 0) | sinks(4))", &shape, NULL, &layout));
  longspan_layout_info info = LONGSPAN_LAYOUT_INFO_INIT;
  check(longspan_layout_get_info(layout, &info));

  const float scale = 0.3f, softcap = 5.0f;
  longspan_options options = LONGSPAN_OPTIONS_INIT;
  options.scale = &scale;
  options.softcap = &softcap;
  options.threads = 2;
  longspan_attention *attention;
  check(longspan_attention_create(layout, &options, &attention));
  longspan_layout_free(layout);

  longspan_tensor q = tensor(0, 4), k = tensor(1, 2), v = tensor(2, 2), dout = tensor(3, 4);
  longspan_tensor out = tensor(0, 4), dq = tensor(0, 4), dk = tensor(0, 2), dv = tensor(0, 2);
  static float lse[4 * TOKENS], lse_lo[4 * TOKENS];
  check(longspan_forward(attention, &q, &k, &v, &out, lse, lse_lo, NULL));
  longspan_gradients gradients = LONGSPAN_GRADIENTS_INIT;
  gradients.dq = &dq;
  gradients.dk = &dk;
  gradients.dv = &dv;
  check(longspan_backward(attention, &q, &k, &v, &out, lse, lse_lo, &dout, NULL, &gradients, NULL));
  longspan_attention_free(attention);

  const int row = TOKENS * HEAD_DIM;
  printf("{\"active_pairs\": %llu, \"out\": %.12g, \"lse\": %.12g, \"dq\": %.12g, \"dk\": %.12g, \"dv\": %.12g}\n",
         (unsigned long long)info.active_pairs, squares(out.data, 4 * row), squares(lse, 4 * TOKENS),
         squares(dq.data, 4 * row), squares(dk.data, 2 * row), squares(dv.data, 2 * row));
  longspan_tensor all[] = {q, k, v, dout, out, dq, dk, dv};
  for (size_t n = 0; n < sizeof(all) / sizeof(all[0]); n++) free(all[n].data);
}
