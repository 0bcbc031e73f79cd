// Loops shared among threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

void relax() {
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
}

// The threads that help one caller. A loop is cut into parts, and whoever comes takes the next; the caller never waits
// for a thread that has not come. OpenMP's loops do, which makes them many times slower once another process wants a
// core. Helpers spin for a while after a loop, longer than a step pauses between two, and then sleep.
class Pool {
  public:
    ~Pool() {
        stop_.store(true);
        publish(0, 0, nullptr, nullptr);
        for (std::thread& thread : threads_) thread.join();
    }

    // Calls body(part) once for each part in [0, parts) on up to `threads` threads, the caller's among them.
    void run(int64_t parts, int64_t threads, void (*body)(const void*, int64_t), const void* context) {
        for (int64_t i = threads_.size(); i < threads - 1; i++) threads_.emplace_back([this, i] { help(i); });
        publish(parts, threads - 1, body, context);
        take();
        while (done_.load(std::memory_order_acquire) < parts) relax();
    }

  private:
    static constexpr int kSpins = 5000;  // some 0.1 ms
    static constexpr int kBits = 20;     // of a part's index and of the count of parts in a ticket

    void publish(int64_t parts, int64_t helpers, void (*body)(const void*, int64_t), const void* context) {
        body_ = body;
        context_ = context;
        helpers_.store(helpers, std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        // A ticket says how many parts its loop has, so that one drawn late cannot be mistaken for the next loop's.
        ticket_.store(static_cast<uint64_t>(parts) << kBits, std::memory_order_release);
        loop_.fetch_add(1, std::memory_order_seq_cst);
        if (asleep_.load(std::memory_order_seq_cst)) loop_.notify_all();
    }

    void take() {
        constexpr uint64_t kMask = (uint64_t{1} << kBits) - 1;
        for (;;) {
            const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
            const int64_t part = ticket & kMask, parts = ticket >> kBits;
            if (part >= parts) return;
            body_(context_, part);  // of the ticket's loop, which cannot end before this part is done
            done_.fetch_add(1, std::memory_order_release);
        }
    }

    void help(int64_t index) {
        for (uint32_t seen = 0;;) {
            uint32_t now = loop_.load(std::memory_order_acquire);
            for (int i = 0; now == seen && i < kSpins; i++, now = loop_.load(std::memory_order_acquire)) relax();
            if (now == seen) {
                asleep_.fetch_add(1, std::memory_order_seq_cst);
                loop_.wait(seen);
                asleep_.fetch_sub(1, std::memory_order_seq_cst);
                continue;
            }
            seen = now;
            if (stop_.load()) return;
            if (index < helpers_.load(std::memory_order_relaxed)) take();
        }
    }

    std::vector<std::thread> threads_;
    void (*body_)(const void*, int64_t) = nullptr;
    const void* context_ = nullptr;
    std::atomic<int64_t> helpers_{0}, done_{0};
    std::atomic<uint64_t> ticket_{0};
    std::atomic<uint32_t> loop_{0}, asleep_{0};
    std::atomic<bool> stop_{false};
};

thread_local Pool pool;  // of the thread that calls

// Calls body(begin, end) on parts of [0, count). Fewer than `least` are not worth sharing.
template <class Body>
void parallel(int64_t count, int64_t threads, int64_t least, const Body& body) {
    if (threads == 1 || count < least) {
        body(int64_t{0}, count);
        return;
    }
    const int64_t parts = std::min(count, 4 * threads);
    const auto run_part = [&](int64_t part) { body(count * part / parts, count * (part + 1) / parts); };
    using Part = decltype(run_part);
    const auto call = [](const void* context, int64_t part) { (*static_cast<const Part*>(context))(part); };
    pool.run(parts, threads, call, &run_part);
}

}  // namespace
