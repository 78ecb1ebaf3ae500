/* Locks of C++ programs, each in a function of its own. */
#include "program.h"
#include <condition_variable>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>

namespace shop
{

/* Mutexes: of a namespace, of a class, of an object on the heap. */
std::mutex orders_mutex;

void take_orders()
{
    orders_mutex.lock();
}

void lock_orders()
{
    orders_mutex.lock();
}

void give_orders()
{
    orders_mutex.unlock();
}

class Registry
{
  public:
    static void lock()
    {
        mutex.lock();
    }
    static void unlock()
    {
        mutex.unlock();
    }

  private:
    static std::mutex mutex;
};

std::mutex Registry::mutex;

class Account
{
  public:
    [[gnu::noinline]] void deposit(long amount);
    void release();

  private:
    long balance = 0;
    std::mutex mutex;
};

void Account::deposit(long amount)
{
    mutex.lock();
    balance += amount;
}

void Account::release()
{
    mutex.unlock();
}

std::unique_ptr<Account> account;

void take_account()
{
    if (!account)
        account = std::make_unique<Account>();
    account->deposit(1);
}

void lock_account()
{
    account->deposit(2);
}

void give_account()
{
    account->release();
}

/* A class of the program around a mutex of the library, and a template. */
template <typename Item> class Queue
{
  public:
    [[gnu::noinline]] void push(Item item);
    void open()
    {
        mutex.unlock();
    }

  private:
    Item last{};
    std::mutex mutex;
};

template <typename Item> void Queue<Item>::push(Item item)
{
    mutex.lock();
    last = item;
}

std::unique_ptr<Queue<std::pair<int, long>>> queue;

void take_queue()
{
    if (!queue)
        queue = std::make_unique<Queue<std::pair<int, long>>>();
    queue->push({1, 2});
}

void lock_queue()
{
    queue->push({3, 4});
}

void give_queue()
{
    queue->open();
}

/* Shared mutex. */
std::shared_mutex catalogue;

void take_exclusive()
{
    catalogue.lock();
}

void give_exclusive()
{
    catalogue.unlock();
}

void take_shared()
{
    catalogue.lock_shared();
}

void give_shared()
{
    catalogue.unlock_shared();
}

void read_catalogue()
{
    catalogue.lock_shared();
}

void write_catalogue()
{
    catalogue.lock();
}

/* Condition variable. */
std::mutex delivery_mutex;
std::condition_variable delivery;
bool is_delivered;

void wait_for_delivery()
{
    std::unique_lock lock(delivery_mutex);
    delivery.wait(lock, [] { return is_delivered; });
    is_delivered = false;
}

void deliver()
{
    {
        std::lock_guard lock(delivery_mutex);
        is_delivered = true;
    }
    delivery.notify_one();
}

/* What a function keeps: made by the first thread that comes, while others wait for its guard. The maker
 * fails at the end, so that it can be made again. */
volatile int is_making, may_fail, has_failed;

class Settings
{
  public:
    Settings()
    {
        is_making = 1;
        until(&may_fail, 1);
        throw std::runtime_error("not today");
    }
};

[[gnu::noinline]] Settings &settings()
{
    static Settings made;
    return made;
}

void read_settings()
{
    try {
        settings();
    } catch (const std::runtime_error &) {
    }
}

void make_settings()
{
    read_settings();
    has_failed = 1;
}

void start_making()
{
    is_making = may_fail = has_failed = 0;
    in_thread(make_settings);
    until(&is_making, 1);
}

void wait_for_maker()
{
    until(&has_failed, 1);
}

void let_fail()
{
    may_fail = 1;
}

} // namespace shop

using namespace shop;

static const scenario scenarios[] = {
    {"namespace", take_orders, lock_orders, give_orders, give_orders},
    {"class", Registry::lock, Registry::lock, Registry::unlock, Registry::unlock},
    {"heap", take_account, lock_account, give_account, give_account},
    {"template", take_queue, lock_queue, give_queue, give_queue},
    {"read", take_exclusive, read_catalogue, give_exclusive, give_shared},
    {"write", take_shared, write_catalogue, give_shared, give_exclusive},
    {"cond", nullptr, wait_for_delivery, deliver, nullptr},
    {"guard", start_making, read_settings, let_fail, wait_for_maker},
};

int main(int argc, char **argv)
{
    run_program(argc, argv, scenarios, sizeof scenarios / sizeof *scenarios);
}
