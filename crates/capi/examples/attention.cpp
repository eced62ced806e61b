// Dilated attention (LongNet) in C++17: handles that release themselves, errors as exceptions.
//
//   c++ -std=c++17 attention.cpp $(pkg-config --cflags --libs longspan) -o attention && ./attention
#include <longspan.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// Throws where a call has failed, with what the library says of it.
void check(longspan_status status) {
  if (status != LONGSPAN_STATUS_OK)
    throw std::runtime_error(std::string(longspan_status_name(status)) + ": " + longspan_last_error());
}

struct release {
  void operator()(longspan_attention *attention) const { longspan_attention_free(attention); }
};

using attention_handle = std::unique_ptr<longspan_attention, release>;

attention_handle dilated(const std::vector<std::uint64_t> &segment_lengths,
                         const std::vector<std::uint64_t> &dilation_rates, const char *within) {
  longspan_branches branches = LONGSPAN_BRANCHES_INIT;
  branches.count = segment_lengths.size();
  branches.segment_lengths = segment_lengths.data();
  branches.dilation_rates = dilation_rates.data();
  branches.within = within;
  longspan_attention *attention = nullptr;
  check(longspan_dilated_create(&branches, nullptr, &attention));
  return attention_handle(attention);
}

// Ends a call after some reports, as a window with a button would.
struct patience {
  int left;
  static int progress(void *context, std::uint64_t, std::uint64_t) {
    return --static_cast<patience *>(context)->left < 0;
  }
};

} // namespace

int main() try {
  constexpr std::int64_t heads = 4, tokens = 2100, dim = 32;
  std::vector<float> x(heads * tokens * dim), out(x.size()), lse(heads * tokens);
  for (std::size_t i = 0; i < x.size(); i++) x[i] = std::sin(0.37f * static_cast<float>(i));
  longspan_tensor input = longspan_tensor_bshd(x.data(), LONGSPAN_F32, 1, tokens, heads, dim), output = input;
  output.data = out.data();

  attention_handle attention = dilated({512, 1024, 2048}, {1, 2, 4}, "causal");
  check(longspan_forward(attention.get(), &input, &input, &input, &output, lse.data(), nullptr, nullptr));
  // The first query attends to its own key alone.
  float apart = 0;
  for (int d = 0; d < dim; d++) apart = std::fmax(apart, std::fabs(out[d] - x[d]));
  std::printf("the first token's output is its value, but for %.0e\n", static_cast<double>(apart));

  patience none{0};
  longspan_hook hook{&none, patience::progress};
  longspan_status status =
      longspan_forward(attention.get(), &input, &input, &input, &output, lse.data(), nullptr, &hook);
  std::printf("a call that was asked to end: %s\n", longspan_last_error());
  longspan_trim();
  return apart < 1e-6f && status == LONGSPAN_STATUS_STOPPED ? 0 : 1;
} catch (const std::exception &error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
