// Goroutines that fight over a mutex, for half a second each time a byte is read. Then it says what the runtime has
// counted that they waited so far, in seconds; null where the runtime (before Go 1.20) does not count it.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"runtime/metrics"
	"sync"
	"time"
)

const waited = "/sync/mutex/wait/total:seconds"

func fight() {
	var mutex sync.Mutex
	var all sync.WaitGroup
	end := time.Now().Add(500 * time.Millisecond)
	for i := 0; i < 16; i++ {
		all.Add(1)
		go func() {
			defer all.Done()
			for time.Now().Before(end) {
				mutex.Lock()
				time.Sleep(200 * time.Microsecond)
				mutex.Unlock()
			}
		}()
	}
	all.Wait()
}

func main() {
	if comm := os.Getenv("LOCKD_COMM"); comm != "" {
		os.WriteFile("/proc/self/comm", []byte(comm), 0o644)
	}
	fmt.Printf("ready %d\n", os.Getpid())
	asked := make([]byte, 1)
	for {
		if n, _ := os.Stdin.Read(asked); n == 0 {
			return
		}
		fight()
		sample := []metrics.Sample{{Name: waited}}
		metrics.Read(sample)
		var seconds *float64
		if sample[0].Value.Kind() == metrics.KindFloat64 {
			told := sample[0].Value.Float64()
			seconds = &told
		}
		line, _ := json.Marshal(map[string]*float64{"waited": seconds})
		fmt.Println(string(line))
	}
}
