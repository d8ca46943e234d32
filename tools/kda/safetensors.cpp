#include "safetensors.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <set>
#include <stdexcept>
#include <system_error>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

namespace kda::cases {
namespace {

using nlohmann::json;

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the format's own reader
constexpr std::size_t kMaxRank = 8;
constexpr int kMaxDepth = 3;  // header { tensor { shape [ ] } }

struct DTypeName {
  DType dtype;
  std::string_view name;
};
constexpr std::array kDTypeNames = {
    DTypeName{DType::kBF16, "BF16"}, DTypeName{DType::kF16, "F16"}, DTypeName{DType::kF32, "F32"},
    DTypeName{DType::kF64, "F64"},   DTypeName{DType::kI32, "I32"}, DTypeName{DType::kI64, "I64"},
};

/// Where the header says a tensor lies, relative to the data.
struct Entry {
  std::string name;
  DType dtype = DType::kNone;
  std::vector<int64_t> shape;
  uint64_t begin = 0;
  uint64_t end = 0;
};

struct Header {
  std::map<std::string, std::string> metadata;
  std::vector<Entry> entries;  // in the order of the data
};

template <class... Parts>
Status invalid(fmt::format_string<Parts...> text, Parts&&... parts) {
  return {StatusCode::kInvalidArgument, fmt::format(text, std::forward<Parts>(parts)...)};
}

/// Any JSON value or name on one line, shortened.
std::string shown(const json& value) {
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

std::string shown_name(const std::string& name) {
  const std::string quoted = shown(json(name));
  const bool plain = std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '.';
  });
  return plain && !name.empty() && name.size() < 50 ? name : quoted;
}

/// Parses JSON, refusing keys given twice and nesting that no header has.
class HeaderParser {
 public:
  static Result<json> parse(std::string_view text) {
    if (Status status = check_ends(text); !status.ok()) return status;
    HeaderParser parser;
    try {
      return json::parse(text.begin(), text.end(),
                         [&parser](int depth, json::parse_event_t event, json& value) {
                           parser.see(depth, event, value);
                           return true;
                         });
    } catch (const json::exception& error) {
      std::string reason = error.what();
      std::replace_if(
          reason.begin(), reason.end(), [](char c) { return c < ' ' || c > '~'; }, ' ');
      return invalid("header: found no valid JSON{} ({:.120}), expected a JSON object",
                     parser.name_.empty() ? "" : " after key " + shown_name(parser.name_), reason);
    } catch (const std::runtime_error& error) {
      return invalid("{}", error.what());
    }
  }

 private:
  /// The format lets { come first and spaces last; JSON would take other white space, and the
  /// parser takes a zero byte for the end.
  static Status check_ends(std::string_view text) {
    if (text.empty()) return invalid("header: found 0 bytes, expected a JSON object");
    if (text[0] != '{') {
      return invalid("header: found byte {:#04x} first, expected {{ of a JSON object",
                     static_cast<unsigned char>(text[0]));
    }
    const std::size_t last = text.find_last_not_of(' ');
    const std::size_t zero = text.find('\0');
    if (zero != std::string_view::npos) {
      return invalid("header: found a zero byte at {}, expected none (spaces pad it)", zero);
    }
    if (text[last] != '}') {
      return invalid("header: found byte {:#04x} last, expected }} of a JSON object, then spaces",
                     static_cast<unsigned char>(text[last]));
    }
    return {};
  }

  void see(int depth, json::parse_event_t event, const json& value) {
    switch (event) {
      case json::parse_event_t::object_start:
      case json::parse_event_t::array_start:
        if (depth >= kMaxDepth) {
          throw std::runtime_error(fmt::format(
              "header: found JSON nested deeper than {} levels, expected none", kMaxDepth));
        }
        if (event == json::parse_event_t::object_start) keys_.emplace_back();
        break;
      case json::parse_event_t::object_end:
        keys_.pop_back();
        break;
      case json::parse_event_t::key: {
        const auto& key = value.get_ref<const std::string&>();
        if (keys_.size() == 1) name_ = key;
        if (!keys_.back().insert(key).second) {
          throw std::runtime_error(
              fmt::format("header: found key {} twice, expected it once", shown_name(key)));
        }
        break;
      }
      default:
        break;
    }
  }

  std::vector<std::set<std::string>> keys_;
  std::string name_;  // the last key of the header itself
};

Status read_shape(const json& shape, Entry& entry) {
  if (!shape.is_array() || shape.size() > kMaxRank) {
    return invalid("{}: found shape {}, expected a list of at most {} sizes",
                   shown_name(entry.name), shown(shape), kMaxRank);
  }
  for (const json& extent : shape) {
    if (!extent.is_number_unsigned() ||
        extent.get<uint64_t>() > uint64_t{std::numeric_limits<int64_t>::max()}) {
      return invalid("{}: found size {} in its shape, expected an integer from 0 to 2^63-1",
                     shown_name(entry.name), shown(extent));
    }
    entry.shape.push_back(extent.get<int64_t>());
  }
  return {};
}

Status read_offsets(const json& offsets, uint64_t data_bytes, Entry& entry) {
  if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
      !offsets[1].is_number_unsigned()) {
    return invalid("{}: found data_offsets {}, expected [begin, end] as integers from 0",
                   shown_name(entry.name), shown(offsets));
  }
  entry.begin = offsets[0].get<uint64_t>();
  entry.end = offsets[1].get<uint64_t>();
  if (entry.begin > entry.end || entry.end > data_bytes) {
    return invalid("{}: found data_offsets [{}, {}], expected begin <= end <= {} bytes of data",
                   shown_name(entry.name), entry.begin, entry.end, data_bytes);
  }
  return {};
}

/// The bytes that dtype and shape need; nothing if that overflows.
std::optional<uint64_t> bytes_of(const Entry& entry) {
  if (std::find(entry.shape.begin(), entry.shape.end(), 0) != entry.shape.end()) return 0;
  uint64_t bytes = size_of(entry.dtype);
  for (const int64_t extent : entry.shape) {
    if (bytes > std::numeric_limits<uint64_t>::max() / static_cast<uint64_t>(extent)) return {};
    bytes *= static_cast<uint64_t>(extent);
  }
  return bytes;
}

Result<Entry> read_entry(const std::string& name, const json& value, uint64_t data_bytes) {
  Entry entry;
  entry.name = name;
  if (!value.is_object() || value.size() != 3 || !value.contains("dtype") ||
      !value.contains("shape") || !value.contains("data_offsets")) {
    return invalid("{}: found {}, expected an object of dtype, shape and data_offsets",
                   shown_name(name), shown(value));
  }
  const json& dtype = value["dtype"];
  for (const DTypeName& known : kDTypeNames) {
    if (dtype.is_string() && dtype.get_ref<const std::string&>() == known.name) {
      entry.dtype = known.dtype;
    }
  }
  if (entry.dtype == DType::kNone) {
    return invalid("{}: found dtype {}, expected BF16, F16, F32, F64, I32 or I64", shown_name(name),
                   shown(dtype));
  }
  if (Status status = read_shape(value["shape"], entry); !status.ok()) return status;
  if (Status status = read_offsets(value["data_offsets"], data_bytes, entry); !status.ok()) {
    return status;
  }
  const std::optional<uint64_t> bytes = bytes_of(entry);
  if (!bytes || *bytes != entry.end - entry.begin) {
    return invalid("{}: found {} bytes of data, expected {} for {} [{}]", shown_name(name),
                   entry.end - entry.begin, bytes ? fmt::to_string(*bytes) : "more than 2^64",
                   name_of(entry.dtype), fmt::join(entry.shape, ","));
  }
  return entry;
}

Status read_metadata(const json& value, Header& header) {
  if (!value.is_object()) {
    return invalid("__metadata__: found {}, expected an object of strings", shown(value));
  }
  for (const auto& [key, text] : value.items()) {
    if (!text.is_string()) {
      return invalid("__metadata__: found {} for {}, expected a string", shown(text),
                     shown_name(key));
    }
    header.metadata[key] = text.get<std::string>();
  }
  return {};
}

/// The tensors must tile the data: each begins where the one before ends.
Status check_tiling(Header& header, uint64_t data_bytes) {
  std::sort(header.entries.begin(), header.entries.end(), [](const Entry& a, const Entry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t expected = 0;
  for (const Entry& entry : header.entries) {
    if (entry.begin != expected) {
      return invalid("{}: found data from byte {}, expected {} ({})", shown_name(entry.name),
                     entry.begin, expected,
                     entry.begin < expected ? "it overlaps the tensor before it"
                                            : "no tensor owns the bytes before it");
    }
    expected = entry.end;
  }
  if (expected != data_bytes) {
    return invalid("file: found {} bytes of data, expected the {} that the tensors own", data_bytes,
                   expected);
  }
  return {};
}

Result<Header> read_header(std::string_view text, uint64_t data_bytes) {
  Result<json> root = HeaderParser::parse(text);
  if (!root.ok()) return root.status();
  if (!root->is_object()) {
    return invalid("header: found {}, expected a JSON object", shown(*root));
  }
  Header header;
  for (const auto& [key, value] : root->items()) {
    if (key == "__metadata__") {
      if (Status status = read_metadata(value, header); !status.ok()) return status;
      continue;
    }
    Result<Entry> entry = read_entry(key, value, data_bytes);
    if (!entry.ok()) return entry.status();
    header.entries.push_back(std::move(*entry));
  }
  if (Status status = check_tiling(header, data_bytes); !status.ok()) return status;
  return header;
}

/// Reads from a file or from memory; `read(offset, bytes, to)` says whether all bytes came.
template <class Read>
Result<TensorFile> read_file(uint64_t file_bytes, const HeaderCheck& check, const Read& read) {
  uint64_t header_bytes = 0;
  if (file_bytes < kLengthBytes || !read(0, kLengthBytes, &header_bytes)) {
    return invalid("file: found {} bytes, expected a header length of 8 bytes", file_bytes);
  }
  if (header_bytes > file_bytes - kLengthBytes || header_bytes > kMaxHeaderBytes) {
    return invalid("header: found a length of {} bytes, expected at most {} in a file of {}",
                   header_bytes, std::min(file_bytes - kLengthBytes, kMaxHeaderBytes), file_bytes);
  }
  std::string text(static_cast<std::size_t>(header_bytes), '\0');
  if (!read(kLengthBytes, header_bytes, text.data())) {
    return invalid("header: found the file's end, expected {} bytes", header_bytes);
  }
  const uint64_t data_begin = kLengthBytes + header_bytes;
  Result<Header> header = read_header(text, file_bytes - data_begin);
  if (!header.ok()) return header.status();
  TensorFile file;
  file.metadata = std::move(header->metadata);
  for (const Entry& entry : header->entries) {
    file.tensors[entry.name].dtype = entry.dtype;
    file.tensors[entry.name].shape = entry.shape;
  }
  if (check) {
    if (Status status = check(file); !status.ok()) return status;
  }
  for (Entry& entry : header->entries) {
    HostTensor tensor = HostTensor::uninitialised(entry.dtype, std::move(entry.shape));
    if (!read(data_begin + entry.begin, entry.end - entry.begin, tensor.bytes.data())) {
      return invalid("{}: found the file's end, expected {} bytes of data", shown_name(entry.name),
                     entry.end - entry.begin);
    }
    file.tensors[entry.name] = std::move(tensor);
  }
  return file;
}

std::string_view file_dtype(DType dtype) {
  for (const DTypeName& known : kDTypeNames) {
    if (known.dtype == dtype) return known.name;
  }
  return "";
}

std::string header_text(const TensorFile& file) {
  json root = json::object();
  if (!file.metadata.empty()) root["__metadata__"] = file.metadata;
  uint64_t offset = 0;
  for (const auto& [name, tensor] : file.tensors) {
    root[name] = {{"dtype", file_dtype(tensor.dtype)},
                  {"shape", tensor.shape},
                  {"data_offsets", {offset, offset + tensor.bytes.size()}}};
    offset += tensor.bytes.size();
  }
  std::string text = root.dump();
  text.append((kLengthBytes - text.size() % kLengthBytes) % kLengthBytes, ' ');  // aligns the data
  return text;
}

}  // namespace

Result<TensorFile> read_safetensors(const std::string& path, const HeaderCheck& check) {
  std::error_code error;
  const auto kind = std::filesystem::status(path, error).type();
  if (kind != std::filesystem::file_type::regular) {
    return invalid("file: found {}, expected a regular file",
                   kind == std::filesystem::file_type::not_found   ? "nothing there"
                   : kind == std::filesystem::file_type::directory ? "a directory"
                                                                   : "something else");
  }
  const uint64_t file_bytes = std::filesystem::file_size(path, error);
  std::ifstream stream(path, std::ios::binary);
  if (error || !stream) return invalid("file: cannot be opened, expected a readable file");
  try {
    return read_file(file_bytes, check, [&stream](uint64_t offset, uint64_t bytes, void* to) {
      if (bytes == 0) return true;
      stream.seekg(static_cast<std::streamoff>(offset));
      stream.read(static_cast<char*>(to), static_cast<std::streamsize>(bytes));
      return static_cast<uint64_t>(stream.gcount()) == bytes;
    });
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory,
                  fmt::format("file: no memory for its {} bytes", file_bytes));
  }
}

Result<TensorFile> parse_safetensors(std::span<const std::byte> content) {
  return read_file(content.size(), {}, [content](uint64_t offset, uint64_t bytes, void* to) {
    if (bytes == 0) return true;
    if (offset > content.size() || bytes > content.size() - offset) return false;
    std::memcpy(to, content.data() + offset, static_cast<std::size_t>(bytes));
    return true;
  });
}

Status write_safetensors(const std::string& path, const TensorFile& file) {
  AtomicFile out;
  if (Status status = out.open(path); !status.ok()) return status;
  return write_safetensors(out, file);
}

Status write_safetensors(AtomicFile& out, const TensorFile& file) {
  const std::string text = header_text(file);
  const uint64_t length = text.size();
  if (Status status = out.write(&length, sizeof length); !status.ok()) return status;
  if (Status status = out.write(text.data(), text.size()); !status.ok()) return status;
  for (const auto& [name, tensor] : file.tensors) {
    if (Status status = out.write(tensor.bytes.data(), tensor.bytes.size()); !status.ok()) {
      return status;
    }
  }
  return out.commit();
}

}  // namespace kda::cases
