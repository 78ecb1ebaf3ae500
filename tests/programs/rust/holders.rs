// Locks of Rust's library and of parking_lot, held by three functions. holders.c is the rest of the program.
use std::ffi::CString;
use std::os::raw::{c_char, c_int};
use std::sync::Mutex;

#[repr(C)]
struct HeldLock {
    name: *const c_char,
    hold: [extern "C" fn(); 3],
    ask: extern "C" fn(),
}

#[link(name = "holders", kind = "static")]
extern "C" {
    fn held(which: c_int);
    fn run_holders(argc: c_int, argv: *const *const c_char, locks: *const HeldLock, count: c_int);
}

static STD: Mutex<u64> = Mutex::new(0);
static PARKING: parking_lot::Mutex<u64> = parking_lot::const_mutex(0);

macro_rules! holder {
    ($name:ident, $which:expr, $take:expr) => {
        #[inline(never)]
        extern "C" fn $name() {
            let mut held_now = $take;
            *held_now += $which;
            unsafe { held($which) };
            drop(held_now);
            unsafe { std::ptr::read_volatile(&$which) }; // so that the release is not the end of the function
        }
    };
}

holder!(std_short, 0, STD.lock().unwrap());
holder!(std_some, 1, STD.lock().unwrap());
holder!(std_long, 2, STD.lock().unwrap());
holder!(std_ask, 3, STD.lock().unwrap());
holder!(parking_short, 0, PARKING.lock());
holder!(parking_some, 1, PARKING.lock());
holder!(parking_long, 2, PARKING.lock());
holder!(parking_ask, 3, PARKING.lock());

fn main() {
    let names = ["std", "parking"].map(|name| CString::new(name).unwrap());
    let locks = [
        HeldLock { name: names[0].as_ptr(), hold: [std_short, std_some, std_long], ask: std_ask },
        HeldLock { name: names[1].as_ptr(), hold: [parking_short, parking_some, parking_long], ask: parking_ask },
    ];
    let arguments: Vec<CString> = std::env::args().map(|one| CString::new(one).unwrap()).collect();
    let pointers: Vec<*const c_char> = arguments.iter().map(|one| one.as_ptr()).collect();
    unsafe { run_holders(pointers.len() as c_int, pointers.as_ptr(), locks.as_ptr(), 2) };
}
