// Sharing work with XLA's own threads, so that no second team of threads competes for the cores.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace jaxserve {

inline void pause_thread() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Work in items that are taken one by one from a shared counter. Whoever is late finds none left, and touches nothing else.
struct Job {
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  int64_t count;
  const void* body;
  void (*run)(const void* body, int64_t item);

  void work() {
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      run(body, item);
      done.fetch_add(1, std::memory_order_release);
    }
  }

  void wait() const {
    for (int spins = 0; done.load(std::memory_order_acquire) < count; spins++) {
      if (spins < 10000) {
        pause_thread();
      } else {
        std::this_thread::yield();
      }
    }
  }
};

// Where helpers linger between jobs. A decoder step is some hundred products, each shorter than it takes to wake a thread; a
// helper that watches for the next job for a moment, before it goes back to the pool, is there when it comes.
class Lobby {
 public:
  // Show a job to the helpers that linger, and say how many they are.
  int64_t post(const std::shared_ptr<Job>& job) {
    std::lock_guard<std::mutex> lock(mutex_);
    latest_ = job;
    number_.fetch_add(1, std::memory_order_release);
    return lingering_.load(std::memory_order_relaxed);
  }

  // A helper's life: do a job, then the next ones that come soon enough.
  void serve(std::shared_ptr<Job> job) {
    while (job != nullptr) {
      int64_t seen = number_.load(std::memory_order_acquire);
      job->work();
      job.reset();
      lingering_.fetch_add(1, std::memory_order_relaxed);
      bool came = watch(seen);
      lingering_.fetch_sub(1, std::memory_order_relaxed);
      if (came) {
        std::lock_guard<std::mutex> lock(mutex_);
        job = latest_;
      }
    }
  }

 private:
  // Whether another job than number `seen` came in time.
  bool watch(int64_t seen) const {
    auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(100);
    do {
      for (int spins = 0; spins < 32; spins++) {
        if (number_.load(std::memory_order_acquire) != seen) return true;
        pause_thread();
      }
    } while (std::chrono::steady_clock::now() < end);
    return false;
  }

  std::mutex mutex_;
  std::shared_ptr<Job> latest_;
  std::atomic<int64_t> number_{0};
  std::atomic<int64_t> lingering_{0};
};

inline Lobby& lobby() {
  static Lobby* lobby = new Lobby;  // never destroyed: helpers may outlive the end of main
  return *lobby;
}

// Run body(0) ... body(count - 1) in the calling thread and in threads of the pool, and return when all are done.
//
// The caller works too and waits for items, never for threads: a pool that is busy with something else makes this slower, but
// cannot make it hang.
template <typename Body>
void parallel_for(xla::ffi::ThreadPool& pool, int64_t count, const Body& body) {
  int64_t threads = std::min(pool.num_threads(), count);
  if (threads <= 1) {
    for (int64_t i = 0; i < count; i++) body(i);
    return;
  }
  auto job = std::make_shared<Job>();
  job->count = count;
  job->body = &body;
  job->run = [](const void* body, int64_t item) { (*static_cast<const Body*>(body))(item); };
  for (int64_t helpers = lobby().post(job) + 1; helpers < threads; helpers++)
    pool.Schedule([job] { lobby().serve(job); });
  job->work();
  job->wait();
}

}  // namespace jaxserve
