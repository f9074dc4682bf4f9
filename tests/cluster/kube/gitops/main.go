// Package main asks the code of GitOps tools about objects: Argo CD's diff and health, kstatus (Flux), Kustomize.
// Each command reads JSON from standard input and writes JSON to standard output.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	appv1 "github.com/argoproj/argo-cd/v3/pkg/apis/application/v1alpha1"
	"github.com/argoproj/argo-cd/v3/util/lua"
	"github.com/argoproj/gitops-engine/pkg/diff"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/cli-utils/pkg/kstatus/status"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

type object = *unstructured.Unstructured

// input is what the commands read; each uses its part.
type input struct {
	Desired object `json:"desired"`
	Live    object `json:"live"`
	// Script is Argo CD's health check in Lua, Key the resource it is for.
	Script string `json:"script"`
	Key    string `json:"key"`
}

var commands = map[string]func(input) (any, error){
	"argo-diff":   argoDiff,
	"argo-health": argoHealth,
	"kstatus":     func(in input) (any, error) { return status.Compute(in.Live) },
}

func argoDiff(in input) (any, error) {
	result, err := diff.Diff(in.Desired, in.Live)
	if err != nil {
		return nil, err
	}
	return map[string]any{
		"modified":  result.Modified,
		"live":      json.RawMessage(result.NormalizedLive),
		"predicted": json.RawMessage(result.PredictedLive),
	}, nil
}

func argoHealth(in input) (any, error) {
	overrides := lua.ResourceHealthOverrides{in.Key: appv1.ResourceOverride{HealthLua: in.Script}}
	return overrides.GetResourceHealth(in.Live)
}

func run(arguments []string) error {
	if len(arguments) == 2 && arguments[0] == "kustomize" {
		built, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), arguments[1])
		if err != nil {
			return err
		}
		text, err := built.AsYaml()
		if err == nil {
			_, err = os.Stdout.Write(text)
		}
		return err
	}
	if len(arguments) != 1 || commands[arguments[0]] == nil {
		return fmt.Errorf("usage: gitops argo-diff|argo-health|kstatus, or gitops kustomize FOLDER; got %q", arguments)
	}
	var in input
	if err := json.NewDecoder(os.Stdin).Decode(&in); err != nil {
		return err
	}
	answer, err := commands[arguments[0]](in)
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(answer)
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
