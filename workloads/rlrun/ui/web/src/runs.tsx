// All runs: how far each is, and why it is no further.
import { useState } from "preact/hooks";
import type { RunList, RunRow } from "./answers";
import { useAnswer } from "./api";
import { ago, number, span } from "./format";
import { Answered, Note, Phase, Title, Wide } from "./parts";
import { to } from "./route";

export function RunsPage() {
  const asked = useAnswer<RunList>("/runs", "*");
  const [words, filter] = useState("");
  const [chosen, choose] = useState<string[]>([]);
  document.title = "All runs · RLRun";
  const toggle = (id: string) => choose(chosen.includes(id) ? chosen.filter((one) => one !== id) : [...chosen, id]);
  return (
    <>
      <Title>All runs</Title>
      <Answered asked={asked}>
        {(found) => {
          const shown = found.runs.filter((run) => fits(run, words));
          if (found.runs.length === 0 && found.refused.length === 0)
            return <Note>{found.nothing}</Note>;
          return (
            <>
              <div class="tools" data-filter>
                <label>
                  <span>Filter</span>
                  <input type="search" value={words} placeholder="name, phase, reason" onInput={(event) => filter(event.currentTarget.value)} />
                </label>
                {chosen.length >= 2 ? (
                  <a class="button" href={to("/compare", { run: chosen })}>
                    Compare {chosen.length} runs
                  </a>
                ) : (
                  <span class="hint">Choose two or more to compare them.</span>
                )}
              </div>
              {shown.length === 0 ? <Note>No run fits “{words}”.</Note> : <Table runs={shown} chosen={chosen} toggle={toggle} />}
              {found.refused.map((one) => (
                <Note key={one.id} kind="problem">
                  Not shown: {one.why}.
                </Note>
              ))}
            </>
          );
        }}
      </Answered>
    </>
  );
}

function fits(run: RunRow, words: string): boolean {
  const text = [run.name, run.where, run.phase, run.reason, run.task].join(" ").toLowerCase();
  return words.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

function Table({ runs, chosen, toggle }: { runs: RunRow[]; chosen: string[]; toggle: (id: string) => void }) {
  return (
    <Wide label="Runs">
      <table>
        <thead>
          <tr>
            <th scope="col">
              <span class="hidden">Compare</span>
            </th>
            <th scope="col">Run</th>
            <th scope="col">Phase</th>
            <th scope="col" class="number">Step</th>
            <th scope="col" class="number">Reward</th>
            <th scope="col" class="number less">Tokens/s</th>
            <th scope="col" class="number less">Restarts</th>
            <th scope="col" class="less">Time left</th>
            <th scope="col" class="less">Last step</th>
            <th scope="col">Reason</th>
          </tr>
        </thead>
        <tbody>
          {runs.map((run) => (
            <tr key={run.id}>
              <td>
                <input type="checkbox" aria-label={`Compare ${run.where}`} checked={chosen.includes(run.id)} disabled={chosen.length >= 8 && !chosen.includes(run.id)} onChange={() => toggle(run.id)} />
              </td>
              <th scope="row">
                <a href={to(`/run/${run.id}`)}>{run.where}</a>
              </th>
              <td>
                <Phase phase={run.phase} />
              </td>
              <td class="number">
                {run.progress.step ?? "–"}
                {run.progress.totalSteps ? ` / ${run.progress.totalSteps}` : ""}
              </td>
              <td class="number">{number(run.progress.reward)}</td>
              <td class="number less">{number(run.progress.tokensPerSecond, 3)}</td>
              <td class="number less">{run.restarts}</td>
              <td class="less">{run.phase === "Running" ? span(run.progress.etaSeconds) : "–"}</td>
              <td class="less">{ago(run.progress.lastStepTime)}</td>
              <td class="reason">
                {run.reason ?? "–"}
                {run.message ? <small> {run.message.slice(0, 160)}</small> : null}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </Wide>
  );
}
