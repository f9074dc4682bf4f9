// List of all runs: progress, small curve, and reason for waiting or failure.
import { useState } from "preact/hooks";
import type { RunList, RunRow } from "./answers";
import { useAnswer } from "./api";
import { ago, between, number, span } from "./format";
import { Answered, Note, Phase, Title, useTitle, Wide } from "./parts";
import { to } from "./route";
import { Spark } from "./spark";

export function RunsPage() {
  const asked = useAnswer<RunList>("/runs", "*");
  const [words, filter] = useState("");
  const [chosen, choose] = useState<string[]>([]);
  useTitle("All runs");
  const toggle = (id: string) => choose(chosen.includes(id) ? chosen.filter((one) => one !== id) : [...chosen, id]);
  return (
    <>
      <Title>All runs</Title>
      <Answered asked={asked}>
        {(found) => {
          const shown = found.runs.filter((run) => fits(run, words));
          if (found.runs.length === 0 && found.refused.length === 0) return <Note>{found.nothing}</Note>;
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
                  <span class="hint">Select two or more runs to compare them.</span>
                )}
              </div>
              {shown.length === 0 ? <Note>No run matches “{words}”.</Note> : <Table runs={shown} chosen={chosen} toggle={toggle} />}
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
      <table class="cards runs">
        <thead>
          <tr>
            <th scope="col">
              <span class="hidden">Compare</span>
            </th>
            <th scope="col">Run</th>
            <th scope="col">Phase</th>
            <th scope="col">Steps</th>
            <th scope="col">Reward or loss</th>
            <th scope="col">Time</th>
            <th scope="col">State</th>
          </tr>
        </thead>
        <tbody>
          {runs.map((run) => (
            <Line key={run.id} run={run} chosen={chosen} toggle={toggle} />
          ))}
        </tbody>
      </table>
    </Wide>
  );
}

function Line({ run, chosen, toggle }: { run: RunRow; chosen: string[]; toggle: (id: string) => void }) {
  const { progress } = run;
  const isChosen = chosen.includes(run.id);
  const loss = progress.reward === null;
  const value = progress.reward ?? progress.loss;
  const restarts = run.restarts === 1 ? "1 restart" : `${run.restarts} restarts`;
  return (
    <tr>
      <td class="pick">
        <label class="tick">
          <input type="checkbox" aria-label={`Compare ${run.where}`} checked={isChosen} disabled={chosen.length >= 8 && !isChosen} onChange={() => toggle(run.id)} />
        </label>
      </td>
      <th scope="row">
        <a href={to(`/run/${run.id}`)}>{run.where}</a>
      </th>
      <td>
        <Phase phase={run.phase} />
      </td>
      <td class="steps">
        {progress.step === null && !progress.totalSteps ? null : `${number(progress.step ?? 0)}${progress.totalSteps ? ` / ${number(progress.totalSteps)}` : ""}`}
        {progress.totalSteps ? <progress aria-label={`Steps of ${run.where}`} max={progress.totalSteps} value={progress.step ?? 0} /> : null}
      </td>
      <td class="curve">
        {progress.step === null ? null : <Spark id={run.id} run={run.where} />}
        {value === null ? null : (
          <span>
            <small>{loss ? "loss" : "reward"}</small> {number(value, 3)}
          </span>
        )}
      </td>
      <td class="time">{time(run)}</td>
      <td class="reason">
        {run.phase === "Complete" ? null : run.reason}
        {run.message && run.phase !== "Running" ? <small> {run.message.slice(0, 160)}</small> : null}
        {run.restarts ? <small> {restarts}</small> : null}
      </td>
    </tr>
  );
}

/** Remaining time of a run, or its duration. */
function time(run: RunRow): string {
  const { etaSeconds, lastStepTime } = run.progress;
  if (run.phase === "Running" && etaSeconds !== null) return `${span(etaSeconds)} left`;
  const end = run.ended ?? lastStepTime;
  const over = ["Complete", "Failed"].includes(run.phase);
  if (over && run.started !== null && lastStepTime !== null) return `took ${between(run.started, lastStepTime)}, ended ${ago(end)}`;
  if (lastStepTime !== null) return `last step ${ago(lastStepTime)}`;
  return run.started === null ? "" : `began ${ago(run.started)}`;
}
