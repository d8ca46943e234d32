// The harness must see what it is there to see.
#include "guard/buffer.h"

#include <cstring>

#include <gtest/gtest.h>

#include "support/names.h"

namespace kda::test {
namespace {

using cases::GuardedBuffer;

const TensorLayout kLayout = TensorLayout::strided(DType::kF32, {2, 3}, {5, 1});

TEST(GuardedBuffer, HoldsElementsByTheirStrides) {
  HostTensor tensor(DType::kF32, {2, 3});
  for (int64_t i = 0; i < 6; ++i) tensor.set(i, static_cast<double>(i));
  GuardedBuffer buffer(kLayout, 3);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.address()) % 64, 12u);
  buffer.load(tensor);
  float value = 0;
  std::memcpy(&value, buffer.address() + 6 * sizeof(float), sizeof value);
  EXPECT_EQ(value, 4.0f);
  EXPECT_EQ(buffer.store().bytes, tensor.bytes);
  buffer.snapshot();
  EXPECT_EQ(buffer.changes(true), "");
  EXPECT_EQ(buffer.changes(false), "");
  EXPECT_EQ(buffer.unwritten(), -1);
}

TEST(GuardedBuffer, SeesWritesBetweenElements) {
  GuardedBuffer buffer(kLayout, 0);
  buffer.snapshot();
  std::memset(buffer.address() + 4, 0, 4);
  EXPECT_EQ(buffer.changes(false), "") << "an element of an output";
  EXPECT_EQ(buffer.changes(true), "byte 4 was written (the tensor has 32 bytes)");
  std::memset(buffer.address() + 12, 0, 1);
  EXPECT_EQ(buffer.changes(false), "byte 12 was written (the tensor has 32 bytes)");
}

TEST(GuardedBuffer, SeesUnwrittenElements) {
  GuardedBuffer buffer(kLayout, 0);
  HostTensor zeros(DType::kF32, {2, 3});
  buffer.load(zeros);
  EXPECT_EQ(buffer.unwritten(), -1);
  std::memset(buffer.address(), 0xFF, sizeof(float) - 1);
  EXPECT_EQ(buffer.unwritten(), -1) << "a value with bytes of the fill";
  std::memset(buffer.address() + 6 * sizeof(float), 0xFF, sizeof(float));
  EXPECT_EQ(buffer.unwritten(), 4);
  buffer.poison();
  EXPECT_EQ(buffer.unwritten(), 0);
}

#if !defined(KDA_GUARD_ASAN)
TEST(GuardedBuffer, SeesWritesBeforeAndBehind) {
  GuardedBuffer buffer(kLayout, 0);
  buffer.address()[-1] = std::byte{0};
  EXPECT_EQ(buffer.changes(false), "byte -1 was written (the tensor has 32 bytes)");
  GuardedBuffer workspace(100);
  workspace.address()[99] = std::byte{0};
  EXPECT_EQ(workspace.changes(false), "");
  workspace.address()[100] = std::byte{0};
  EXPECT_EQ(workspace.changes(false), "byte 100 was written (the tensor has 100 bytes)");
}
#else
TEST(GuardedBufferDeathTest, ReadsBeforeAndBehindEnd) {
  GuardedBuffer buffer(kLayout, 0);
  EXPECT_DEATH(buffer.address()[-1] = std::byte{0}, "poison");
  EXPECT_DEATH(buffer.address()[32] = std::byte{0}, "poison");
}
#endif

}  // namespace
}  // namespace kda::test
