// An HTTP server whose requests share a mutex: `served ADDRESS`.
package main

import (
	"fmt"
	"log"
	"net/http"
	"os"
	"sync"
	"time"
)

func main() {
	var mutex sync.Mutex
	counts := map[string]int{}
	http.HandleFunc("/", func(answer http.ResponseWriter, request *http.Request) {
		mutex.Lock()
		defer mutex.Unlock()
		counts[request.URL.Path]++
		time.Sleep(200 * time.Microsecond)
		fmt.Fprintln(answer, counts[request.URL.Path])
	})
	log.Fatal(http.ListenAndServe(os.Args[1], nil))
}
