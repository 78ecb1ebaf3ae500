// A lock of C, or a sync.Mutex of Go, that three functions of a Go program hold.
// `holders_go LOCK [ASKERS=3] [SECONDS=10]`, with the protocol of README.md. LOCK is `pthread` or `sync`. With each
// SIGUSR1 the program prints what Go's own mutex profile says of a sync.Mutex: by function, for how long others waited.
package main

/*
#cgo CFLAGS: -I..
#cgo LDFLAGS: -L../build -lholders -pthread
#include "holders.h"

void run_locks(int argc, char **argv);
*/
import "C"

import (
	"encoding/json"
	"os"
	"os/signal"
	"runtime"
	"sync"
	"syscall"
)

var mutex sync.Mutex

//export syncShort
func syncShort() {
	mutex.Lock()
	C.held(C.SHORT)
	mutex.Unlock()
}

//export syncSome
func syncSome() {
	mutex.Lock()
	C.held(C.SOME)
	mutex.Unlock()
}

//export syncLong
func syncLong() {
	mutex.Lock()
	C.held(C.LONG)
	mutex.Unlock()
}

//export syncAsk
func syncAsk() {
	mutex.Lock()
	C.held(C.HOLDERS)
	mutex.Unlock()
}

var holders = map[string]string{
	"main.syncShort": "short", "main.syncSome": "some", "main.syncLong": "long", "main.syncAsk": "ask",
}

// By holder, the cycles for which others waited.
func profile() map[string]int64 {
	records := make([]runtime.BlockProfileRecord, 1000)
	count, isWhole := runtime.MutexProfile(records)
	if !isWhole {
		panic("more records than there is room for")
	}
	cycles := map[string]int64{}
	for _, record := range records[:count] {
		frames := runtime.CallersFrames(record.Stack())
		for {
			frame, more := frames.Next()
			if which, found := holders[frame.Function]; found {
				cycles[which] += record.Cycles
				break
			}
			if !more {
				break
			}
		}
	}
	return cycles
}

func printProfiles(asked <-chan os.Signal) {
	for range asked {
		if err := json.NewEncoder(os.Stdout).Encode(profile()); err != nil {
			panic(err)
		}
	}
}

// Go interrupts threads by signals, and nanosleep() of C must not be interrupted.
func withoutPreemption() {
	const name, value = "GODEBUG", "asyncpreemptoff=1"
	if os.Getenv(name) == value {
		return
	}
	os.Setenv(name, value)
	panic(syscall.Exec("/proc/self/exe", os.Args, os.Environ()))
}

// The main thread runs main(): its name is that of the process.
func init() {
	runtime.LockOSThread()
}

func main() {
	withoutPreemption()
	runtime.SetMutexProfileFraction(1)
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, syscall.SIGUSR1)
	go printProfiles(asked)
	arguments := make([]*C.char, len(os.Args))
	for i, argument := range os.Args {
		arguments[i] = C.CString(argument)
	}
	C.run_locks(C.int(len(arguments)), &arguments[0])
}
