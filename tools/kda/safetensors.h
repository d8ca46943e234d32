// Reader and writer of safetensors files: u64 header length, JSON header, raw little-endian data.
//
// The reader takes no statement of the file on trust. It accepts only what the format allows (the
// tensors tile the data without gap or overlap, no key twice), of the dtypes that this library
// knows, and every refusal is one line naming the tensor, what was found and what was expected.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <span>
#include <string>

#include "atomic_file.h"
#include "kda/status.h"
#include "tensor.h"

namespace kda::cases {

struct TensorFile {
  std::map<std::string, std::string> metadata;
  std::map<std::string, HostTensor> tensors;
};

/// Sees the header as a file whose tensors have dtypes and shapes but no bytes.
using HeaderCheck = std::function<Status(const TensorFile&)>;

/// `check` may refuse the header before any data is read.
Result<TensorFile> read_safetensors(const std::string& path, const HeaderCheck& check = {});
/// The same from memory.
Result<TensorFile> parse_safetensors(std::span<const std::byte> content);

/// Writes a temporary file beside `path`, flushes it to the disk and renames it: on a failure an
/// old file at `path` is as it was, and nothing new is left.
Status write_safetensors(const std::string& path, const TensorFile& file);
/// The same into a file that was opened before the tensors were computed.
Status write_safetensors(AtomicFile& out, const TensorFile& file);

}  // namespace kda::cases
