// Memoization of a pure function, for calls that every training step repeats.
#pragma once
#include <cstddef>
#include <unordered_map>

namespace ak {

/// Cache of at most `most` results; clears itself when full. `Key` has == and hash().
template <class Key, class Value>
class Memo {
 public:
  explicit Memo(std::size_t most) : most_(most) {}

  /// Null if absent.
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

/// Hash of a sequence of integers.
template <class... Numbers>
std::size_t hash_of(Numbers... numbers) {
  std::size_t hash = 0;
  ((hash = (hash ^ static_cast<std::size_t>(numbers)) * 0x9e3779b97f4a7c15, hash ^= hash >> 29), ...);
  return hash;
}

}  // namespace ak
