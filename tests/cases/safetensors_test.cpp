// Files as they should be written, and what must be refused. Malformed files in depth: tests/cli.
#include "safetensors.h"

#include <cstring>
#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>

namespace kda::cases {
namespace {

namespace fs = std::filesystem;

class Directory : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = testing::TempDir() + "kda_safetensors_XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    path_ = name;
  }
  void TearDown() override { fs::remove_all(path_); }

  std::string file(const std::string& name) const { return (path_ / name).string(); }
  std::size_t entries() const {
    return static_cast<std::size_t>(
        std::distance(fs::directory_iterator(path_), fs::directory_iterator()));
  }

 private:
  fs::path path_;
};

TensorFile sample() {
  TensorFile sample;
  sample.metadata["note"] = "quotes \" and \\ and \xC3\xA9";
  sample.tensors["x"] = HostTensor(DType::kF32, {2, 3});
  sample.tensors["x"].set(5, 0.5);
  sample.tensors["empty"] = HostTensor(DType::kI64, {0, 7});
  sample.tensors["scalar"] = HostTensor(DType::kBF16, {});
  return sample;
}

Result<TensorFile> parse(const std::string& header, const std::string& data) {
  const uint64_t length = header.size();
  std::string content(8, '\0');
  std::memcpy(content.data(), &length, 8);
  content += header + data;
  return parse_safetensors(std::as_bytes(std::span(content)));
}

using Safetensors = Directory;

TEST_F(Safetensors, WhatIsWrittenIsRead) {
  ASSERT_TRUE(write_safetensors(file("a"), sample()).ok());
  Result<TensorFile> read = read_safetensors(file("a"));
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(read->metadata, sample().metadata);
  ASSERT_EQ(read->tensors.size(), 3U);
  EXPECT_EQ(read->tensors["x"].shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(read->tensors["x"].get(5), 0.5);
  EXPECT_EQ(read->tensors["empty"].count(), 0);
  EXPECT_EQ(read->tensors["scalar"].count(), 1);
}

TEST_F(Safetensors, DataBeginsAtAMultipleOfEight) {
  ASSERT_TRUE(write_safetensors(file("a"), sample()).ok());
  std::ifstream stream(file("a"), std::ios::binary);
  uint64_t length = 0;
  stream.read(reinterpret_cast<char*>(&length), 8);
  EXPECT_EQ(length % 8, 0U);
}

TEST_F(Safetensors, AFailedWriteLeavesTheOldFileAndNothingElse) {
  std::ofstream(file("old")) << "old";
  fs::create_directory(file("target"));
  EXPECT_FALSE(write_safetensors(file("target"), sample()).ok());
  EXPECT_FALSE(write_safetensors(file("missing/a"), sample()).ok());
  EXPECT_FALSE(write_safetensors("/dev/full", sample()).ok());
  EXPECT_EQ(entries(), 2U);
  EXPECT_TRUE(fs::is_character_file("/dev/full"));
}

TEST_F(Safetensors, AWriteThroughALinkKeepsTheLink) {
  std::ofstream(file("old")) << "old";
  fs::create_symlink("old", file("link"));
  ASSERT_TRUE(write_safetensors(file("link"), sample()).ok());
  EXPECT_TRUE(fs::is_symlink(file("link")));
  EXPECT_TRUE(read_safetensors(file("old")).ok());
  EXPECT_EQ(entries(), 2U);
}

TEST_F(Safetensors, ALinkToNothingGetsItsTarget) {
  fs::create_symlink("target", file("link"));
  ASSERT_TRUE(write_safetensors(file("link"), sample()).ok());
  EXPECT_TRUE(fs::is_symlink(file("link")));
  EXPECT_TRUE(read_safetensors(file("target")).ok());
  EXPECT_EQ(entries(), 2U);
}

TEST_F(Safetensors, AnOpenFileHasNoNameBeforeItIsCommitted) {
  AtomicFile out;
  ASSERT_TRUE(out.open(file("a")).ok());
  ASSERT_TRUE(out.write("x", 1).ok());
  const std::size_t while_open = entries();  // 1 where the file system knows no unnamed files
  EXPECT_LE(while_open, 1U);
  EXPECT_FALSE(fs::exists(file("a")));
  ASSERT_TRUE(out.commit().ok());
  EXPECT_EQ(fs::file_size(file("a")), 1U);
  EXPECT_EQ(entries(), 1U);
}

TEST_F(Safetensors, TheHeaderIsCheckedBeforeTheData) {
  ASSERT_TRUE(write_safetensors(file("a"), sample()).ok());
  Result<TensorFile> read = read_safetensors(file("a"), [](const TensorFile& header) {
    EXPECT_EQ(header.tensors.size(), 3U);
    EXPECT_EQ(header.tensors.at("x").shape, (std::vector<int64_t>{2, 3}));
    EXPECT_TRUE(header.tensors.at("x").bytes.empty());
    return Status(StatusCode::kUnsupported, "refused");
  });
  ASSERT_FALSE(read.ok());
  EXPECT_EQ(read.status().message(), "refused");
}

TEST_F(Safetensors, TheHeaderBeginsWithABraceAndEndsWithSpacesAlone) {
  const std::string good = R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
  const std::string data(4, '\0');
  EXPECT_TRUE(parse(good, data).ok());
  EXPECT_TRUE(parse(good + "   ", data).ok());
  for (const std::string& bad :
       {good + '\0', good + std::string("\0junk", 5), good + std::string("\0}", 2), good + "\n",
        good + "\t ", good + " x", good + "{}", " " + good, "\n" + good, "\xEF\xBB\xBF" + good}) {
    EXPECT_FALSE(parse(bad, data).ok()) << bad;
  }
}

TEST_F(Safetensors, EveryTruncationIsRefused) {
  ASSERT_TRUE(write_safetensors(file("a"), sample()).ok());
  std::ifstream stream(file("a"), std::ios::binary);
  const std::string content{std::istreambuf_iterator<char>(stream), {}};
  for (std::size_t size = 0; size < content.size(); ++size) {
    const auto bytes = std::as_bytes(std::span(content.data(), size));
    EXPECT_FALSE(parse_safetensors(bytes).ok()) << size;
  }
}

TEST_F(Safetensors, MessagesAreOneLineAndNameTheTensor) {
  struct Bad {
    const char* header;
    const char* part;
  };
  for (const Bad& bad : {
           Bad{R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", "x: found 4 bytes"},
           Bad{R"({"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", "x: found dtype"},
           Bad{R"({"x\n":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", "size -1"},
           Bad{R"({"x":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}})", "no valid JSON"},
           Bad{R"({"x":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}})", "no valid JSON"},
           Bad{R"({"x":{"dtype":"F32","shape":[4611686018427387904,8],"data_offsets":[0,4]}})",
               "more than 2^64"},
           Bad{R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"x":{}})", "twice"},
           Bad{R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
               R"("y":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
               "y: found data from byte 0, expected 4 (it overlaps"},
           Bad{R"({"x":[[[[]]]]})", "nested deeper"},
       }) {
    Result<TensorFile> read = parse(bad.header, std::string(4, '\0'));
    ASSERT_FALSE(read.ok()) << bad.header;
    EXPECT_EQ(read.status().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(read.status().message().find(bad.part), std::string::npos) << read.status().message();
    EXPECT_EQ(read.status().message().find('\n'), std::string::npos);
  }
}

TEST_F(Safetensors, NestingAsDeepAsTheFileIsRefusedWithoutRecursion) {
  EXPECT_FALSE(parse(std::string(1 << 20, '['), "").ok());
  std::string objects;
  for (int i = 0; i < 100000; ++i) objects += "{\"a\":";
  EXPECT_FALSE(parse(objects, "").ok());
}

}  // namespace
}  // namespace kda::cases
