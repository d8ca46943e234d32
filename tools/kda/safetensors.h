// Reader and writer of safetensors files: u64 header length, JSON header, raw little-endian data.
//
// The reader takes no statement of the file on trust. It accepts only what the format allows (the
// tensors tile the data without gap or overlap, no key twice), of the dtypes that this library
// knows, and every refusal is one line naming the tensor, what was found and what was expected.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <string>

#include "kda/status.h"
#include "tensor.h"

namespace kda::cases {

struct TensorFile {
  std::map<std::string, std::string> metadata;
  std::map<std::string, HostTensor> tensors;
};

Result<TensorFile> read_safetensors(const std::string& path);
/// The same from memory.
Result<TensorFile> parse_safetensors(std::span<const std::byte> content);

/// Writes a temporary file beside `path`, flushes it to the disk and renames it: on a failure an
/// old file at `path` is as it was, and nothing new is left.
Status write_safetensors(const std::string& path, const TensorFile& file);

}  // namespace kda::cases
