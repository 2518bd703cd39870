// The bytes that Go makes of a registration, for tests/core/test_hami.py: `go run hami_register.go > hami_register.json`.
// The fields and their tags are those that HAMi 2.10 decodes; the struct is this file's own.
package main

import (
	"encoding/json"
	"os"
)

type registered struct {
	ID         string         `json:"id,omitempty"`
	Index      uint           `json:"index,omitempty"`
	Count      int32          `json:"count,omitempty"`
	Devmem     int32          `json:"devmem,omitempty"`
	Devcore    int32          `json:"devcore,omitempty"`
	Type       string         `json:"type,omitempty"`
	Numa       int            `json:"numa,omitempty"`
	Mode       string         `json:"mode,omitempty"`
	Health     bool           `json:"health,omitempty"`
	Vendor     string         `json:"devicevendor,omitempty"`
	CustomInfo map[string]any `json:"custominfo,omitempty"`
}

func main() {
	cases := []registered{
		{ID: "8eff74b5-0000-1000-801b-b56457addd1b", Count: 10, Devmem: 196288, Devcore: 304, Type: "AMD Instinct MI300X VF",
			Health: true, Vendor: "amd", CustomInfo: map[string]any{"pciBDF": "0000:83:00.0"}},
		{ID: "GPU-0000000000000001-3#cpx", Index: 3, Count: 1, Devmem: 2147483647, Devcore: 38, Type: "AMD <R&D> \"x\"\\\u2028\u2029é\t\b\f\u0001\u007f",
			Numa: -1, Mode: "cpx", Vendor: "amd", CustomInfo: map[string]any{"partitionProfile": "cpx_nps4", "cuPerWGP": 2, "pciBDF": "a<b",
				"partitionProfiles": []any{map[string]any{"type": "SPX", "profile_index": 0, "memory_caps": "NPS1,NPS4"}}}},
		{ID: "bare", Type: "AMD GPU", Vendor: "amd", CustomInfo: map[string]any{}},
	}
	text, err := json.Marshal(cases)
	if err != nil {
		panic(err)
	}
	os.Stdout.Write(append(text, '\n'))
}
