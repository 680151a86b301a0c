// Package main looks at the cluster's network from inside a pod: it answers HTTP, asks HTTP, and looks names up.
package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sort"
	"strings"
	"time"
)

const patience = 10 * time.Second

func serve(address string) error {
	name, err := os.Hostname()
	if err != nil {
		return err
	}
	// The answer says who answered and whom that one saw asking.
	handler := func(out http.ResponseWriter, request *http.Request) {
		fmt.Fprintf(out, "%s %s\n", name, request.RemoteAddr)
	}
	server := http.Server{Addr: address, Handler: http.HandlerFunc(handler), ReadHeaderTimeout: patience}
	return server.ListenAndServe()
}

func get(url string) error {
	client := http.Client{Timeout: patience}
	answer, err := client.Get(url)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(io.LimitReader(answer.Body, 1<<16))
	if err != nil {
		return err
	}
	fmt.Printf("%d %s\n", answer.StatusCode, strings.TrimSpace(string(body)))
	return nil
}

func lookup(name string) error {
	bounded, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	addresses, err := net.DefaultResolver.LookupHost(bounded, name)
	if err != nil {
		return err
	}
	sort.Strings(addresses)
	fmt.Println(strings.Join(addresses, " "))
	return nil
}

func main() {
	actions := map[string]func(string) error{"serve": serve, "get": get, "lookup": lookup}
	if len(os.Args) != 3 || actions[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "probe serve ADDRESS | get URL | lookup NAME")
		os.Exit(2)
	}
	if err := actions[os.Args[1]](os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
