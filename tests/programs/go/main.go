// Locks of Go programs: goroutines wait for a sync.Mutex, and so their threads park until there is work again.
// `names_go [ROUNDS=40] [HOLD_US=50000]`, with the protocol of README.md.
package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"sync"
	"time"
)

var orders sync.Mutex

func lockOrders(asked *sync.WaitGroup) {
	orders.Lock()
	orders.Unlock()
	asked.Done()
}

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

func main() {
	const workers = 8
	rounds, held := number(1, 40), time.Duration(number(2, 50000))*time.Microsecond
	runtime.GOMAXPROCS(4)
	if err := os.WriteFile("/proc/self/comm", []byte(os.Getenv("LOCKD_COMM")), 0); err != nil {
		panic(err)
	}
	fmt.Println("ready", os.Getpid())
	stdin := bufio.NewReader(os.Stdin)
	if _, err := stdin.ReadByte(); err != nil {
		panic(err)
	}
	for round := 0; round < rounds; round++ {
		var asked sync.WaitGroup
		asked.Add(workers)
		orders.Lock()
		for i := 0; i < workers; i++ {
			go lockOrders(&asked)
		}
		time.Sleep(held)
		orders.Unlock()
		asked.Wait()
	}
	fmt.Printf("{\"goroutine_waits\": %d}\n", rounds*workers)
	io.Copy(io.Discard, stdin)
}
