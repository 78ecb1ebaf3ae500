//! Locks of Rust programs, each in a function of its own: those of the standard library and of parking_lot.
//! `names_rust SCENARIO [ROUNDS=40] [HOLD_US=50000]`, with the protocol of README.md.

use std::fs;
use std::io::{stdin, stdout, Read, Write};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::SeqCst};
use std::sync::{Condvar, Mutex, Once, RwLock};
use std::thread;
use std::time::{Duration, Instant};

/// One lock: the main thread takes it and, when the asker sleeps, lets it go.
struct Scenario {
    name: &'static str,
    /// Takes the lock and calls the function before it lets go.
    hold: fn(&dyn Fn()),
    /// Takes it and lets go at once.
    ask: fn(),
}

static ORDERS: Mutex<u64> = Mutex::new(0);
static CATALOGUE: RwLock<u64> = RwLock::new(0);
static DELIVERED: Mutex<bool> = Mutex::new(false);
static DELIVERY: Condvar = Condvar::new();
static FAST_ORDERS: parking_lot::Mutex<u64> = parking_lot::const_mutex(0);
static FAST_CATALOGUE: parking_lot::RwLock<u64> = parking_lot::const_rwlock(0);
static FAST_DELIVERED: parking_lot::Mutex<bool> = parking_lot::const_mutex(false);
static FAST_DELIVERY: parking_lot::Condvar = parking_lot::Condvar::new();

fn hold_orders(hold: &dyn Fn()) {
    let _guard = ORDERS.lock().unwrap();
    hold();
}

#[inline(never)]
fn lock_orders() {
    *ORDERS.lock().unwrap() += 1;
}

fn hold_exclusive(hold: &dyn Fn()) {
    let _guard = CATALOGUE.write().unwrap();
    hold();
}

fn hold_shared(hold: &dyn Fn()) {
    let _guard = CATALOGUE.read().unwrap();
    hold();
}

#[inline(never)]
fn read_catalogue() {
    let _guard = CATALOGUE.read().unwrap();
}

#[inline(never)]
fn write_catalogue() {
    *CATALOGUE.write().unwrap() += 1;
}

fn deliver(hold: &dyn Fn()) {
    hold();
    *DELIVERED.lock().unwrap() = true;
    DELIVERY.notify_one();
}

#[inline(never)]
fn wait_for_delivery() {
    let mut is_delivered = DELIVERED.lock().unwrap();
    while !*is_delivered {
        is_delivered = DELIVERY.wait(is_delivered).unwrap();
    }
    *is_delivered = false;
}

/// One for each round, as no other thread can do it over.
static PREPARED: [Once; 100] = {
    #[allow(clippy::declare_interior_mutable_const)]
    const NOT_YET: Once = Once::new();
    [NOT_YET; 100]
};
static ROUND: AtomicU64 = AtomicU64::new(0);

fn hold_once(hold: &dyn Fn()) {
    PREPARED[ROUND.load(SeqCst) as usize].call_once(hold);
}

#[inline(never)]
fn need_prepared() {
    PREPARED[ROUND.load(SeqCst) as usize].call_once(|| panic!("nobody prepares"));
}

static WORKER_MAY_END: AtomicBool = AtomicBool::new(false);

fn let_worker_end(hold: &dyn Fn()) {
    WORKER_MAY_END.store(false, SeqCst);
    hold();
    WORKER_MAY_END.store(true, SeqCst);
}

#[inline(never)]
fn join_worker() {
    let worker = thread::spawn(|| until(|| WORKER_MAY_END.load(SeqCst)));
    worker.join().unwrap();
}

static PARKED: Mutex<Option<thread::Thread>> = Mutex::new(None);
static IS_WORK: AtomicBool = AtomicBool::new(false);

fn unpark_worker(hold: &dyn Fn()) {
    hold();
    IS_WORK.store(true, SeqCst);
    PARKED.lock().unwrap().take().unwrap().unpark();
}

#[inline(never)]
fn park_until_work() {
    *PARKED.lock().unwrap() = Some(thread::current());
    while !IS_WORK.swap(false, SeqCst) {
        thread::park();
    }
}

fn hold_fast_orders(hold: &dyn Fn()) {
    let _guard = FAST_ORDERS.lock();
    hold();
}

#[inline(never)]
fn lock_fast_orders() {
    *FAST_ORDERS.lock() += 1;
}

fn hold_fast_exclusive(hold: &dyn Fn()) {
    let _guard = FAST_CATALOGUE.write();
    hold();
}

fn hold_fast_shared(hold: &dyn Fn()) {
    let _guard = FAST_CATALOGUE.read();
    hold();
}

#[inline(never)]
fn read_fast_catalogue() {
    let _guard = FAST_CATALOGUE.read();
}

#[inline(never)]
fn write_fast_catalogue() {
    *FAST_CATALOGUE.write() += 1;
}

fn deliver_fast(hold: &dyn Fn()) {
    hold();
    *FAST_DELIVERED.lock() = true;
    FAST_DELIVERY.notify_one();
}

#[inline(never)]
fn wait_for_fast_delivery() {
    let mut is_delivered = FAST_DELIVERED.lock();
    while !*is_delivered {
        FAST_DELIVERY.wait(&mut is_delivered);
    }
    *is_delivered = false;
}

/// The asker first waits for news, then for a mutex. It sleeps on the same word, that of its thread.
fn deliver_fast_then_hold(hold: &dyn Fn()) {
    if ROUND.load(SeqCst) == 1 {
        deliver_fast(hold);
    } else {
        hold_fast_orders(hold);
    }
}

#[inline(never)]
fn wait_for_fast_delivery_then_lock() {
    if ROUND.load(SeqCst) == 1 {
        wait_for_fast_delivery();
    } else {
        lock_fast_orders();
    }
}

const SCENARIOS: &[Scenario] = &[
    Scenario { name: "mutex", hold: hold_orders, ask: lock_orders },
    Scenario { name: "read", hold: hold_exclusive, ask: read_catalogue },
    Scenario { name: "write", hold: hold_shared, ask: write_catalogue },
    Scenario { name: "cond", hold: deliver, ask: wait_for_delivery },
    Scenario { name: "once", hold: hold_once, ask: need_prepared },
    Scenario { name: "join", hold: let_worker_end, ask: join_worker },
    Scenario { name: "park", hold: unpark_worker, ask: park_until_work },
    Scenario { name: "pl_mutex", hold: hold_fast_orders, ask: lock_fast_orders },
    Scenario { name: "pl_read", hold: hold_fast_exclusive, ask: read_fast_catalogue },
    Scenario { name: "pl_write", hold: hold_fast_shared, ask: write_fast_catalogue },
    Scenario { name: "pl_cond", hold: deliver_fast, ask: wait_for_fast_delivery },
    Scenario { name: "pl_both", hold: deliver_fast_then_hold, ask: wait_for_fast_delivery_then_lock },
];

/// Sleeps until it holds, without a futex.
fn until(holds: impl Fn() -> bool) {
    while !holds() {
        thread::sleep(Duration::from_micros(50));
    }
}

/// Whether that thread sleeps in the system call futex.
fn is_in_futex(tid: i64) -> bool {
    let number = if cfg!(target_arch = "x86_64") { "202" } else { "98" };
    let call = fs::read_to_string(format!("/proc/self/task/{tid}/syscall")).unwrap_or_default();
    call.split(' ').next() == Some(number)
}

static TID: AtomicI64 = AtomicI64::new(0);
static ASKED: AtomicU64 = AtomicU64::new(0);
static FINISHED: AtomicU64 = AtomicU64::new(0);

fn asker(ask: fn(), rounds: u64) {
    let link = fs::read_link("/proc/thread-self").unwrap();
    TID.store(link.file_name().unwrap().to_str().unwrap().parse().unwrap(), SeqCst);
    for round in 1..=rounds {
        until(|| ASKED.load(SeqCst) >= round);
        ask();
        FINISHED.store(round, SeqCst);
    }
}

fn main() {
    let given: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, otherwise: u64| given.get(at).map_or(otherwise, |text| text.parse().unwrap());
    let name = given.first().map_or("", |name| name);
    let scenario = SCENARIOS.iter().find(|one| one.name == name).expect("no such scenario");
    let (rounds, held) = (number(1, 40), Duration::from_micros(number(2, 50_000)));
    let mut byte = [0];
    if let Ok(comm) = std::env::var("LOCKD_COMM") {
        fs::write("/proc/self/comm", comm).unwrap();
    }
    println!("ready {}", std::process::id());
    stdin().read_exact(&mut byte).unwrap();
    let ask = scenario.ask;
    thread::spawn(move || asker(ask, rounds));
    until(|| TID.load(SeqCst) > 0);
    let began = Instant::now();
    for round in 1..=rounds {
        ROUND.store(round, SeqCst);
        (scenario.hold)(&|| {
            ASKED.store(round, SeqCst);
            until(|| is_in_futex(TID.load(SeqCst)));
            thread::sleep(held);
        });
        until(|| FINISHED.load(SeqCst) >= round);
    }
    println!("{{\"waits\": {rounds}, \"blocked\": {rounds}, \"wall_us\": {}}}", began.elapsed().as_micros());
    stdout().flush().unwrap();
    stdin().read_to_end(&mut Vec::new()).unwrap();
}
