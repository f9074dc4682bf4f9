// One run: state and causes, curves, times, staleness, evaluations, manifest.
import { useState } from "preact/hooks";
import type { CostView, Curves, FindingView, Manifest, RunView, Staleness, Timeline, TracedSteps } from "./answers";
import { address, useAnswer } from "./api";
import { Lags, Times } from "./bars";
import { Chart } from "./chart";
import { ago, number, span } from "./format";
import { Answered, Choice, Facts, Field, Note, Phase, Section, Title, Wide } from "./parts";
import { change, to } from "./route";
import { ClusterSections } from "./cluster";
import { HistorySection, LineageSection } from "./past";

const USUAL = ["reward/mean", "loss", "validation/loss", "off_policy/mean", "mismatch_kl", "entropy", "grad_norm", "completion_length/mean", "perf/throughput", "time/step"];
export const SMOOTH = [["1", "not at all"], ["5", "over 5 steps"], ["20", "over 20 steps"], ["100", "over 100 steps"]] as const;

export function RunPage({ id, query }: { id: string; query: URLSearchParams }) {
  const asked = useAnswer<RunView>(`/runs/${id}`, id);
  return (
    <Answered asked={asked}>
      {(found) => {
        document.title = `${found.run.name} · RLRun`;
        return (
          <>
            <Title>
              {found.run.name} <Phase phase={found.run.phase} />
            </Title>
            <nav aria-label="Of this run">
              <a href={to("/")}>All runs</a>
              {found.files ? <a href={to(`/run/${id}/rollouts`)}>Rollouts</a> : null}
            </nav>
            <State found={found} />
            <LineageSection id={id} />
            <WhySection found={found} />
            {found.unread.map((why) => (
              <Note key={why}>Not shown: {why}.</Note>
            ))}
            {found.files ? (
              <>
                <CurvesSection id={id} found={found} query={query} />
                <EvaluationSection id={id} found={found} query={query} />
                <TimesSection id={id} query={query} />
                <LagsSection id={id} query={query} />
              </>
            ) : null}
            <GpuSection id={id} found={found} query={query} />
            <Attempts found={found} />
            {found.files ? <HistorySection id={id} /> : null}
            {found.place === "cluster" ? <ClusterSections found={found} /> : null}
            <ManifestSection id={id} place={found.place} />
          </>
        );
      }}
    </Answered>
  );
}

function State({ found }: { found: RunView }) {
  const { run, wait } = found;
  const { progress } = run;
  const facts: [string, preact.ComponentChildren][] = [
    ["Step", `${progress.step ?? "–"}${progress.totalSteps ? ` of ${progress.totalSteps}` : ""}`],
    [progress.reward === null ? "Loss" : "Reward", number(progress.reward ?? progress.loss)],
    ["Time left", run.phase === "Running" ? span(progress.etaSeconds) : "–"],
    ["Tokens/s", number(progress.tokensPerSecond, 3)],
    ["Staleness", progress.stalenessMean === null ? "–" : `${number(progress.stalenessMean, 3)} versions`],
    ["Checkpoint", progress.checkpointStep === null ? "none yet" : `step ${progress.checkpointStep}`],
    ["Attempt", `${run.attempt}${run.restarts ? `, ${run.restarts} restarts` : ""}`],
    ["Last step", ago(progress.lastStepTime)],
    ...(found.cost ? [["Cost", cost(found.cost)] as [string, string]] : []),
    [found.place === "cluster" ? "Namespace" : "Folder", found.place === "cluster" ? (run.where.split("/")[0] ?? "") : run.where],
  ];
  return (
    <>
      {progress.totalSteps ? <progress aria-label="Steps trained" max={progress.totalSteps} value={progress.step ?? 0} /> : null}
      <Facts facts={facts} />
      {wait ? (
        <p>
          The next step waits for {wait.role ? `the ${wait.role}: ` : ""}
          {wait.text}
          {wait.since ? ` (for ${ago(wait.since).replace(" ago", "")})` : ""}.
        </p>
      ) : null}
      {found.results.map((line) => (
        <p key={line}>{line}</p>
      ))}
      {found.command && run.phase !== "Running" && run.phase !== "Complete" ? (
        <p>
          Go on with it: <code>{found.command}</code>
        </p>
      ) : null}
    </>
  );
}

const USES: Record<string, string> = {
  trained: "trained",
  waitedForRollouts: "waited for rollouts",
  waitedForTrainer: "waited for the trainer",
  startup: "started up",
  repeated: "repeated",
  stopping: "stopped",
};

/** Hours, and what they were spent on. */
function cost({ gpus, hours, uses }: CostView): string {
  const all = hours * 3600;
  const parts = uses.map(({ use, seconds }) => `${Math.round((100 * seconds) / all)} % ${USES[use] ?? "other"}`);
  return `${number(hours, 3)} ${gpus ? "GPU-hours" : "hours of the machine"}: ${parts.join(", ")}`;
}

function WhySection({ found }: { found: RunView }) {
  const { why } = found;
  const quiet = why.now.length === 0 && why.before.length === 0 && why.besides.length === 0;
  return (
    <Section title="Why" id="why">
      {quiet ? <p class="note">Nothing is wrong, and nothing is waited for.</p> : null}
      <ul class="findings">
        {why.now.map((one) => (
          <Finding key={one.what} found={one} />
        ))}
        {why.before.map((one) => (
          <Finding key={one.what} found={one} />
        ))}
        {why.besides.map((one) => (
          <li key={one}>{one}</li>
        ))}
      </ul>
    </Section>
  );
}

function Finding({ found }: { found: FindingView }) {
  return (
    <li class={found.kind}>
      <strong>{found.what}</strong>
      {found.since ? <small> since {ago(found.since).replace(" ago", "")}</small> : null}
      {found.evidence ? <pre tabIndex={0} aria-label="Evidence">{found.evidence}</pre> : null}
      <p>→ {found.do}</p>
    </li>
  );
}

/** First and last step that are shown, and how much curves are smoothed: part of the address, so that a link shows the same. */
export function View({ query, metrics, extra }: { query: URLSearchParams; metrics: string[]; extra?: string }) {
  return (
    <div class="tools" data-filter>
      <Field label="From step" value={query.get("first") ?? ""} put={(first) => change({ first })} />
      <Field label="To step" value={query.get("last") ?? ""} put={(last) => change({ last })} />
      <Choice label="Smooth" value={query.get("smooth") ?? "1"} options={SMOOTH} put={(smooth) => change({ smooth: smooth === "1" ? null : smooth })} />
      <Field label="Also draw" type="text" list="metrics" placeholder="name of a metric" value={extra ?? ""} put={(metric) => change({ metric })} />
      <datalist id="metrics">
        {metrics.map((name) => (
          <option key={name} value={name} />
        ))}
      </datalist>
      {query.has("first") || query.has("last") ? (
        <button type="button" onClick={() => change({ first: null, last: null })}>
          Show all steps
        </button>
      ) : null}
    </div>
  );
}

const zoom = (first: number, last: number) => change({ first: Math.max(0, first), last });

function range(query: URLSearchParams) {
  return { first: query.get("first"), last: query.get("last") };
}

function CurvesSection({ id, found, query }: { id: string; found: RunView; query: URLSearchParams }) {
  const extra = query.get("metric") ?? "";
  const wanted = [...new Set([...(extra ? [extra] : []), ...USUAL])].filter((name) => name === extra || found.metrics.includes(name));
  const path = wanted.length ? address(`/runs/${id}/curves`, { metric: wanted, smooth: query.get("smooth"), points: 800, ...range(query) }) : null;
  const asked = useAnswer<Curves>(path, id);
  return (
    <Section title="Curves" id="curves">
      <View query={query} metrics={found.metrics} extra={extra} />
      {wanted.length === 0 ? (
        <Note>No step has been trained yet; curves begin with the first.</Note>
      ) : (
        <Answered asked={asked}>
          {(answer) => (
            <div class="charts">
              {answer.curves.map((curve) => (
                <Chart key={curve.metric} title={curve.metric} curves={[{ label: curve.metric, steps: curve.steps, values: curve.values }]} zoom={zoom} />
              ))}
            </div>
          )}
        </Answered>
      )}
    </Section>
  );
}

function EvaluationSection({ id, found, query }: { id: string; found: RunView; query: URLSearchParams }) {
  const names = found.metrics.filter((name) => name.startsWith("eval/") && /\/(reward\/mean|pass@\d+)$/.test(name)).slice(0, 24);
  const asked = useAnswer<Curves>(names.length ? address(`/runs/${id}/curves`, { metric: names, points: 800, ...range(query) }) : null, id);
  if (names.length === 0) return null;
  return (
    <Section title="Evaluations" id="evaluations">
      <Answered asked={asked}>
        {(answer) => (
          <div class="charts">
            {answer.curves.map((curve) => (
              <Chart key={curve.metric} title={curve.metric} curves={[{ label: curve.metric, steps: curve.steps, values: curve.values }]} zoom={zoom} />
            ))}
          </div>
        )}
      </Answered>
    </Section>
  );
}

function TimesSection({ id, query }: { id: string; query: URLSearchParams }) {
  const asked = useAnswer<Timeline>(address(`/runs/${id}/timeline`, range(query)), id);
  return (
    <Section title="Who waited for whom" id="times">
      <Answered asked={asked}>{(found) => <Times found={found} />}</Answered>
    </Section>
  );
}

const MEMORY = "perf/peak_memory";
const FLOPS = "perf/mfu";
const LOSSES = ["waitedForRollouts", "waitedForTrainer", "startup", "stopping"];

/** Of a run on GPUs: what its trainer made of them, the memory that it took, and the time in which they were held for nothing. */
function GpuSection({ id, found, query }: { id: string; found: RunView; query: URLSearchParams }) {
  const names = [FLOPS, MEMORY].filter((name) => found.metrics.includes(name));
  const asked = useAnswer<Curves>(names.length ? address(`/runs/${id}/curves`, { metric: names, smooth: query.get("smooth"), points: 800, ...range(query) }) : null, id);
  const cost = found.cost?.gpus ? found.cost : null;
  if (names.length === 0 && cost === null) return null;
  const all = (cost?.hours ?? 0) * 3600;
  const lost = (cost?.uses ?? []).filter((one) => LOSSES.includes(one.use)).reduce((sum, one) => sum + one.seconds, 0);
  return (
    <Section title="GPU use" id="gpus">
      {cost && all ? (
        <p>
          {number((100 * lost) / all, 2)} % of {number(cost.hours, 3)} GPU-hours were spent without training: starting up, waiting, stopping.
        </p>
      ) : null}
      {names.length ? (
        <Answered asked={asked}>
          {(answer) => (
            <div class="charts">
              {answer.curves.map((curve) => {
                const [title, part] = curve.metric === MEMORY ? ["Most memory of a trainer's GPU in the step, GiB", 2 ** 30] : ["Share of the GPUs' peak FLOP/s that the trainer used, %", 0.01];
                return <Chart key={curve.metric} title={title} curves={[{ label: title, steps: curve.steps, values: curve.values.map((value) => value / part) }]} zoom={zoom} />;
              })}
            </div>
          )}
        </Answered>
      ) : null}
      <p class="hint">Of every GPU, the engines' too, by the second: the dashboards of docs/monitoring.md.</p>
    </Section>
  );
}

function LagsSection({ id, query }: { id: string; query: URLSearchParams }) {
  const traced = useAnswer<TracedSteps>(`/runs/${id}/traces`, id);
  const last = traced.answer?.spans.at(-1)?.[1];
  const chosen = query.get("of");
  const step = chosen ?? last;
  const asked = useAnswer<Staleness>(step === undefined ? null : address(`/runs/${id}/staleness`, { step }));
  return (
    <Section title="Staleness" id="staleness">
      {step === undefined ? (
        <Note>No step has a trace yet.</Note>
      ) : (
        <>
          <div class="tools">
            <Field label="Step" value={String(step)} put={(of) => change({ of })} />
          </div>
          <Answered asked={asked}>{(found) => <Lags found={found} />}</Answered>
        </>
      )}
    </Section>
  );
}

function Attempts({ found }: { found: RunView }) {
  return (
    <Section title="Attempts and failures" id="attempts">
      {found.failures.length === 0 ? <p class="note">No attempt has failed.</p> : null}
      <Wide label="Attempts">
        <table class="plain">
          <thead>
            <tr>
              <th scope="col">Attempt</th>
              <th scope="col">Steps that count</th>
              <th scope="col">Ended by</th>
              <th scope="col">When</th>
              <th scope="col">Said</th>
            </tr>
          </thead>
          <tbody>
            {numbers(found).map((attempt) => {
              const steps = found.attempts.find((one) => one.attempt === attempt);
              const failure = found.failures.find((one) => one.attempt === attempt);
              return (
                <tr key={attempt}>
                  <th scope="row">{attempt}</th>
                  <td>{steps ? `${steps.firstStep} to ${steps.lastStep}` : "none"}</td>
                  <td>{failure ? `${failure.reason} (${failure.process}${failure.exitCode === null ? "" : `, exit code ${failure.exitCode}`})` : "–"}</td>
                  <td>{failure ? ago(failure.time) : "–"}</td>
                  <td class="reason">{failure?.message ?? "–"}</td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </Wide>
    </Section>
  );
}

function numbers(found: RunView): number[] {
  return [...new Set([...found.attempts.map((one) => one.attempt), ...found.failures.map((one) => one.attempt)])].sort((a, b) => b - a);
}

function ManifestSection({ id, place }: { id: string; place: RunView["place"] }) {
  const [open, toggle] = useState(false);
  const asked = useAnswer<Manifest>(open ? `/runs/${id}/manifest` : null);
  return (
    <Section title="Manifest" id="manifest">
      <details onToggle={(event) => toggle(event.currentTarget.open)}>
        <summary>{place === "cluster" ? "The RLRun as it is applied, without secrets" : "The resolved configuration, without secrets"}</summary>
        {open ? <Answered asked={asked}>{(found) => <pre tabIndex={0} aria-label="Manifest">{found.text}</pre>}</Answered> : null}
      </details>
    </Section>
  );
}
