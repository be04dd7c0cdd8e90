// Results of a pure function, kept by argument: what a training step asks for again and again.
#pragma once
#include <cstddef>
#include <unordered_map>

namespace ak {

/// At most `most` results; then all go, which in a loop happens once. `Key` has == and hash().
template <class Key, class Value>
class Memo {
 public:
  explicit Memo(std::size_t most) : most_(most) {}

  /// Null if it is not there.
  const Value* find(const Key& key) const {
    const auto found = values_.find(key);
    return found == values_.end() ? nullptr : &found->second;
  }
  void keep(const Key& key, const Value& value) {
    if (values_.size() >= most_) values_.clear();
    values_.emplace(key, value);
  }

 private:
  struct Hash {
    std::size_t operator()(const Key& key) const { return key.hash(); }
  };
  std::size_t most_;
  std::unordered_map<Key, Value, Hash> values_;
};

/// A hash of whole numbers, one after the other.
template <class... Numbers>
std::size_t hash_of(Numbers... numbers) {
  std::size_t hash = 0;
  ((hash = (hash ^ static_cast<std::size_t>(numbers)) * 0x9e3779b97f4a7c15, hash ^= hash >> 29), ...);
  return hash;
}

}  // namespace ak
