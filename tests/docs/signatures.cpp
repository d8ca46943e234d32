// Prints the tensors of every operation as the tables of docs/tensors.md.
#include <cstdio>

#include <fmt/core.h>

#include "kda/kda.h"

namespace {

void print_operation(kda::Operation operation) {
  fmt::print("### {}\n\n", kda::name_of(operation));
  fmt::print("| tensor | role | shape | element types | default | what |\n");
  fmt::print("|---|---|---|---|---|---|\n");
  const kda::Problem bf16 = kda::Problem::make(operation, {}, kda::DType::kBF16);
  for (const kda::TensorSpec& spec : kda::tensors_of(operation)) {
    const char* role = spec.role == kda::Role::kInput ? "in" : "out";
    const bool io = bf16[spec.id].dtype == kda::DType::kBF16;
    fmt::print("| {} | {} | {} | {} | {} | {} |\n", kda::name_of(spec.id),
               spec.required ? fmt::format("**{}**", role) : role, spec.shape,
               kda::describe(spec.dtypes),
               !spec.required ? "absent"
               : io           ? "io"
                              : kda::name_of(bf16[spec.id].dtype),
               spec.about);
  }
  fmt::print("\n");
}

}  // namespace

int main() {
  for (int i = 0; i < kda::kOperationCount; ++i) print_operation(static_cast<kda::Operation>(i));
}
