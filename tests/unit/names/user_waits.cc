// The same with what C++20 has: see user_waits.c.

#include <mutex>
#include <shared_mutex>
#include <condition_variable>
#include <thread>
#include <future>
#include <semaphore>
#include <latch>
#include <barrier>
#include <atomic>
#include <sys/prctl.h>
#include <unistd.h>
#define NI __attribute__((noinline))
namespace shop
{
struct Registry {
    static std::mutex mutex;
    static std::shared_mutex shared;
    static thread_local std::mutex own;
    NI void mutex_caller()
    {
        std::lock_guard<std::mutex> g(mutex);
        asm volatile("");
    }
    NI void unique_caller()
    {
        std::unique_lock<std::mutex> g(mutex);
        asm volatile("");
    }
    NI void scoped_caller()
    {
        static std::mutex second;
        std::scoped_lock g(mutex, second);
        asm volatile("");
    }
    NI void shared_caller()
    {
        std::shared_lock<std::shared_mutex> g(shared);
        asm volatile("");
    }
    NI void exclusive_caller()
    {
        std::unique_lock<std::shared_mutex> g(shared);
        asm volatile("");
    }
    NI void tlsmember_caller()
    {
        own.lock();
        own.lock();
        asm volatile("");
    }
};
std::mutex Registry::mutex;
std::shared_mutex Registry::shared;
thread_local std::mutex Registry::own;
std::mutex cm;
std::condition_variable cv;
std::condition_variable_any cva;
std::counting_semaphore<5> sem(0);
std::latch latch(2);
std::barrier bar(2);
std::promise<int> promise;
std::shared_future<int> fut = promise.get_future().share();
std::once_flag flag;
std::atomic<int> initialising; // threads that initialise something for ever
std::atomic<int> word;
NI void condition_caller()
{
    std::unique_lock<std::mutex> l(cm);
    cv.wait(l);
    asm volatile("");
}
NI void conditionany_caller()
{
    std::unique_lock<std::mutex> l(cm);
    cva.wait(l);
    asm volatile("");
}
NI void cpredicate_caller()
{
    std::unique_lock<std::mutex> l(cm);
    cv.wait_for(l, std::chrono::hours(1), [] { return false; });
    asm volatile("");
}
NI void semaphore_caller()
{
    sem.acquire();
    asm volatile("");
}
NI void latch_caller()
{
    latch.wait();
    asm volatile("");
}
NI void barrier_caller()
{
    bar.arrive_and_wait();
    asm volatile("");
}
NI void future_caller()
{
    fut.wait();
    asm volatile("");
}
NI void callonce_caller()
{
    std::call_once(flag, [] {
        ++initialising;
        pause();
    });
    asm volatile("");
}
NI void atomic_caller()
{
    word.wait(0);
    asm volatile("");
}
struct Slow {
    Slow()
    {
        ++initialising;
        pause();
    }
};
NI void guard_caller()
{
    static Slow s;
    asm volatile("");
}
std::thread *never;
NI void jointhread_caller()
{
    never->join();
    asm volatile("");
}
} // namespace shop
using namespace shop;
template <class F> void start(const char *name, F f)
{
    std::thread([=] {
        prctl(PR_SET_NAME, name);
        f();
        asm volatile("");
    }).detach();
}
int main()
{
    Registry r;
    Registry::mutex.lock();
    Registry::shared.lock();
    never = new std::thread([] { pause(); });
    start("i1", [] { callonce_caller(); });
    start("i2", [] { guard_caller(); });
    while (initialising < 2)
        usleep(1000);
#define S(n) start(#n, [] { n##_caller(); })
#define M(n) start(#n, [] { Registry().n##_caller(); })
    M(mutex);
    M(unique);
    M(scoped);
    M(shared);
    M(exclusive);
    M(tlsmember);
    S(condition);
    S(conditionany);
    S(cpredicate);
    S(semaphore);
    S(latch);
    S(barrier);
    S(future);
    S(callonce);
    S(atomic);
    S(guard);
    S(jointhread);
    pause();
}
