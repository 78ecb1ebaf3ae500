// A lock of C that a Go program takes: its thread waits for it, not the goroutine alone.
// `names_cgo [ROUNDS=40] [HOLD_US=50000]`, with the protocol of README.md.
package main

/*
#cgo LDFLAGS: -pthread
#include <pthread.h>

static pthread_mutex_t ledger_mutex = PTHREAD_MUTEX_INITIALIZER;
static long entries;

static __attribute__((noinline)) void lock_ledger(void)
{
	pthread_mutex_lock(&ledger_mutex);
	entries++;
}

static __attribute__((noinline)) void unlock_ledger(void)
{
	pthread_mutex_unlock(&ledger_mutex);
}

*/
import "C"

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
)

func number(at, otherwise int) int {
	if len(os.Args) <= at {
		return otherwise
	}
	value, err := strconv.Atoi(os.Args[at])
	if err != nil {
		panic(err)
	}
	return value
}

// Whether that thread sleeps in the system call futex.
func isInFutex(tid int) bool {
	call, err := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/syscall", tid))
	return err == nil && strings.HasPrefix(string(call), fmt.Sprint(syscall.SYS_FUTEX, " "))
}

func ask(tids chan<- int, asked <-chan int, finished chan<- int) {
	runtime.LockOSThread()
	tids <- syscall.Gettid()
	for round := range asked {
		C.lock_ledger()
		C.unlock_ledger()
		finished <- round
	}
}

func main() {
	rounds, held := number(1, 40), time.Duration(number(2, 50000))*time.Microsecond
	runtime.LockOSThread()
	if err := os.WriteFile("/proc/self/comm", []byte(os.Getenv("LOCKD_COMM")), 0); err != nil {
		panic(err)
	}
	fmt.Println("ready", os.Getpid())
	stdin := bufio.NewReader(os.Stdin)
	if _, err := stdin.ReadByte(); err != nil {
		panic(err)
	}
	tids, asked, finished := make(chan int), make(chan int, 1), make(chan int)
	go ask(tids, asked, finished)
	tid := <-tids
	for round := 0; round < rounds; round++ {
		C.lock_ledger()
		asked <- round
		for in := 0; in < 20; { // its goroutine waits for the channel in a futex too, but not for so long
			if isInFutex(tid) {
				in++
			} else {
				in = 0
			}
			time.Sleep(time.Millisecond)
		}
		time.Sleep(held)
		C.unlock_ledger()
		<-finished
	}
	fmt.Printf("{\"waits\": %d}\n", rounds)
	io.Copy(io.Discard, stdin)
}
