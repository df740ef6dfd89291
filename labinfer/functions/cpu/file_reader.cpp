// Asynchronous file reads with threads of its own.
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kFileEnds = -1;

struct Piece {
  int64_t slot, position, size;
  char* dest;
};

// Reads a piece of the file. Returns 0, an errno, or kFileEnds.
int64_t read_piece(int file, Piece piece) {
  while (piece.size > 0) {
    const ssize_t count = pread(file, piece.dest, piece.size, piece.position);
    if (count == 0) return kFileEnds;
    if (count < 0) {
      if (errno == EINTR) continue;
      return errno;
    }
    piece.dest += count;
    piece.position += count;
    piece.size -= count;
  }
  return 0;
}

class Reader {
 public:
  Reader(int file, int64_t slots, int threads) : file_(file), left_(slots), errors_(slots) {
    sigset_t all, before;  // signals are delivered to Python's threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { run(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  ~Reader() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    arrived_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void add(int64_t slot, int64_t position, char* dest, int64_t size, int64_t piece_size) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      errors_[slot] = 0;
      for (int64_t begin = 0; begin < size; begin += piece_size) {
        const int64_t count = std::min(piece_size, size - begin);
        queue_.push_back({slot, position + begin, count, dest + begin});
        ++left_[slot];
      }
    }
    arrived_.notify_all();
  }

  int64_t wait(int64_t slot) {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return left_[slot] == 0; });
    return errors_[slot];
  }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      arrived_.wait(lock, [this] { return closed_ || !queue_.empty(); });
      if (closed_) return;
      const Piece piece = queue_.front();
      queue_.pop_front();
      lock.unlock();
      const int64_t error = read_piece(file_, piece);
      lock.lock();
      if (error != 0) errors_[piece.slot] = error;
      if (--left_[piece.slot] == 0) done_.notify_all();
    }
  }

  const int file_;
  std::vector<int64_t> left_, errors_;  // of each slot: pieces left to read, and its error
  std::deque<Piece> queue_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable arrived_, done_;
  bool closed_ = false;
};

}  // namespace

extern "C" {

Reader* reader_open(int file, int64_t slots, int threads) { return new Reader(file, slots, threads); }

// Starts reading a range of the file into a memory slot, in pieces.
void reader_add(Reader* reader, int64_t slot, int64_t position, char* dest, int64_t size, int64_t piece_size) {
  reader->add(slot, position, dest, size, piece_size);
}

// Waits until a slot is read. Returns 0, an errno, or -1 if the file ended.
int64_t reader_wait(Reader* reader, int64_t slot) { return reader->wait(slot); }

void reader_close(Reader* reader) { delete reader; }

}  // extern "C"
