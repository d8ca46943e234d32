// Any bytes as a case file: loading either refuses them with a line of text, or gives a case that
// holds together and survives being written and read again.
#include <cstdint>
#include <cstdlib>

#include "case.h"
#include "compare.h"

namespace {

using namespace kda;
using namespace kda::cases;

void require(bool condition) {
  if (!condition) std::abort();
}

void check_refusal(const Status& status) {
  require(status.code() == StatusCode::kInvalidArgument);
  require(!status.message().empty() && status.message().size() < 1000);
  require(status.message().find('\n') == std::string::npos);
}

void check_case(const Case& c) {
  require(forward_problem(c).validated().ok());
  if (c.has_gradients()) require(backward_problem(c).validated().ok());
  for (const TokenRange& range : sequences_of(c)) {
    require(range.begin >= 0 && range.begin <= range.end && range.end <= c.forward.sizes.T);
  }
  for (const auto& [id, tensor] : c.expected) compare(c, id, tensor, tensor);
  Result<Case> again = make_case(c.name, to_file(c));
  require(again.ok());
  for (const auto& [id, tensor] : c.inputs) require(again->input(id)->bytes == tensor.bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  Result<TensorFile> file = parse_safetensors(std::as_bytes(std::span(data, size)));
  if (!file.ok()) {
    check_refusal(file.status());
    return 0;
  }
  Result<Case> c = make_case("input", std::move(*file));
  if (c.ok()) {
    check_case(*c);
  } else {
    check_refusal(c.status());
  }
  return 0;
}
