// Page of one run: state and causes, curves, times, staleness, evaluations, manifest.
import { useState } from "preact/hooks";
import type { CostView, Curves, CurveView, FindingView, Manifest, RunView, Staleness, Timeline, TracedSteps } from "./answers";
import { address, useAnswer } from "./api";
import { Lags, Times } from "./bars";
import { Chart, type Curve } from "./chart";
import { ClusterSections } from "./cluster";
import { ago, between, number, span } from "./format";
import { Answered, Facts, Field, Note, Phase, Section, Title, useTitle, Wide } from "./parts";
import { HistorySection, LineageSection } from "./past";
import { change, to } from "./route";
import { range, scaling, smooth, View, zoom } from "./view";

const USUAL = ["loss", "entropy", "completion_length/mean", "grad_norm", "mismatch_kl", "off_policy/mean", "perf/throughput", "time/step"];
/** Maximum number of held-out curves in one chart with the training curve; more are hard to distinguish. */
const HELD_OUT_MAX = 5;

export function RunPage({ id, query }: { id: string; query: URLSearchParams }) {
  const asked = useAnswer<RunView>(`/runs/${id}`, id);
  const run = asked.answer?.run;
  useTitle(run ? `${run.name}: ${run.phase}` : `Run ${id.split(".")[0]}`);
  return (
    <Answered asked={asked}>
      {(found) => (
        <>
          <nav aria-label="Path">
            <a href={to("/")}>All runs</a>
          </nav>
          <div class="top">
            <Title>
              {found.run.name} <Phase phase={found.run.phase} />
            </Title>
            {found.files && found.run.task !== "SFT" ? (
              <a class="button" href={to(`/run/${id}/rollouts`)}>
                Rollouts
              </a>
            ) : null}
          </div>
          <State found={found} />
          <WhySection found={found} />
          {found.unread.map((why) => (
            <Note key={why}>Not shown: {why}.</Note>
          ))}
          {found.files ? (
            <>
              <CurvesSection id={id} found={found} query={query} />
              <EvaluationSection id={id} found={found} query={query} />
              <TimesSection id={id} query={query} />
              {found.metrics.includes("off_policy/mean") || found.run.task !== "SFT" ? <LagsSection id={id} query={query} /> : null}
            </>
          ) : null}
          <GpuSection id={id} found={found} query={query} />
          <LineageSection id={id} />
          <Attempts found={found} />
          {found.files ? <HistorySection id={id} /> : null}
          {found.place === "cluster" ? <ClusterSections found={found} /> : null}
          <ManifestSection id={id} place={found.place} />
        </>
      )}
    </Answered>
  );
}

function State({ found }: { found: RunView }) {
  const { run, wait } = found;
  const { progress } = run;
  const over = run.phase === "Complete" || run.phase === "Failed";
  const facts: [string, preact.ComponentChildren][] = [];
  const add = (name: string, value: preact.ComponentChildren | null) => value !== null && facts.push([name, value]);
  add("Step", progress.step === null && !progress.totalSteps ? null : `${number(progress.step ?? 0)}${progress.totalSteps ? ` of ${number(progress.totalSteps)}` : ""}`);
  add("Reward", progress.reward === null ? null : number(progress.reward, 3));
  add("Loss", progress.loss === null ? null : number(progress.loss, 3));
  add("Time left", run.phase === "Running" && progress.etaSeconds !== null ? span(progress.etaSeconds) : null);
  add("Took", over && run.started !== null && progress.lastStepTime !== null ? between(run.started, progress.lastStepTime) : null);
  add("Tokens per second", progress.tokensPerSecond === null ? null : number(progress.tokensPerSecond, 3));
  add("Staleness", progress.stalenessMean === null ? null : `${number(progress.stalenessMean, 3)} versions`);
  add("Checkpoint", progress.checkpointStep === null ? (run.phase === "Running" ? "none yet" : null) : `step ${number(progress.checkpointStep)}`);
  add("Attempt", run.attempt ? `${run.attempt}${run.restarts ? `, ${run.restarts === 1 ? "1 restart" : `${run.restarts} restarts`}` : ""}` : null);
  add("Last step", progress.lastStepTime === null ? null : ago(progress.lastStepTime));
  add("Cost", found.cost ? cost(found.cost) : null);
  add(found.place === "cluster" ? "Namespace" : "Folder", found.place === "cluster" ? (run.where.split("/")[0] ?? "") : run.where);
  return (
    <>
      {progress.totalSteps ? <progress aria-label="Steps trained" max={progress.totalSteps} value={progress.step ?? 0} /> : null}
      <Facts facts={facts} />
      {wait && !over ? (
        <p>
          The next step waits for {wait.role ? `the ${wait.role}: ` : ""}
          {wait.role && wait.text.startsWith(`${wait.role}: `) ? wait.text.slice(wait.role.length + 2) : wait.text}
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

/** Hours in total and by use. */
function cost({ gpus, hours, uses }: CostView): string {
  const all = hours * 3600;
  const parts = uses.map(({ use, seconds }) => `${Math.round((100 * seconds) / all)} % ${USES[use] ?? "other"}`);
  return `${number(hours, 3)} ${gpus ? "GPU-hours" : "machine hours"}: ${parts.join(", ")}`;
}

function WhySection({ found }: { found: RunView }) {
  const { why } = found;
  const quiet = why.now.length === 0 && why.before.length === 0 && why.besides.length === 0;
  return (
    <Section title="Why" id="why">
      {quiet ? <p class="note">No problem is known, and the run does not wait for anything.</p> : null}
      <ul class="findings">
        {why.now.map((one) => (
          <Finding key={one.what} found={one} />
        ))}
        {why.besides.map((one) => (
          <li key={one}>{one}</li>
        ))}
      </ul>
      {why.before.length === 0 ? null : (
        <details open={found.run.phase === "Failed"}>
          <summary>{why.before.length === 1 ? "1 earlier failure" : `${why.before.length} earlier failures`}</summary>
          <ul class="findings">
            {why.before.map((one) => (
              <Finding key={one.what} found={one} />
            ))}
          </ul>
        </details>
      )}
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

/** Chart of a single curve, with the server's title. */
function Alone({ view, query }: { view: CurveView; query: URLSearchParams }) {
  return <Chart title={view.title} curves={[{ label: view.metric, view }]} scaling={scaling(query)} zoom={zoom} />;
}

/** Learning curves: training together with held-out curves. */
function learning(metrics: string[]): string[] {
  const training = metrics.includes("reward/mean") ? "reward/mean" : "loss";
  if (!metrics.includes(training)) return [];
  const heldOut = training === "loss" ? ["validation/loss"] : metrics.filter((name) => /^eval\/.+\/reward\/mean$/.test(name));
  return [training, ...heldOut.filter((name) => metrics.includes(name)).slice(0, HELD_OUT_MAX)];
}

function CurvesSection({ id, found, query }: { id: string; found: RunView; query: URLSearchParams }) {
  const extra = query.get("metric") ?? "";
  const first = learning(found.metrics);
  const others = [...new Set([...(extra ? [extra] : []), ...USUAL])].filter((name) => name === extra || (found.metrics.includes(name) && name !== first[0]));
  const wanted = [...new Set([...first, ...others])];
  const path = wanted.length ? address(`/runs/${id}/curves`, { metric: wanted, smooth: smooth(query), points: 600, ...range(query) }) : null;
  const asked = useAnswer<Curves>(path, id);
  return (
    <Section title="Curves" id="curves">
      {wanted.length === 0 ? (
        <Note>No step has been trained yet; curves start with the first step.</Note>
      ) : (
        <>
          <View query={query} metrics={found.metrics} extra={extra} />
          <Answered asked={asked}>
            {(answer) => {
              const view = (name: string) => answer.curves.find((one) => one.metric === name);
              return (
                <div class="charts">
                  <Learning views={first.flatMap((name) => view(name) ?? [])} query={query} />
                  {others.map((name) => {
                    const one = view(name);
                    return one ? <Alone key={name} view={one} query={query} /> : null;
                  })}
                </div>
              );
            }}
          </Answered>
        </>
      )}
    </Section>
  );
}

function Learning({ views, query }: { views: CurveView[]; query: URLSearchParams }) {
  const [training] = views;
  if (training === undefined) return null;
  const label = (view: CurveView) => (view.metric === "validation/loss" ? "validation" : view.metric.startsWith("eval/") ? `held out: ${view.metric.slice("eval/".length, -"/reward/mean".length)}` : "training");
  const curves = views.map((view): Curve => ({ label: label(view), view, sparse: view !== training }));
  const besides = training.metric === "loss" ? "validation" : "held out";
  return (
    <div class="first">
      <Chart title={views.length > 1 ? `${training.title}: training and ${besides}` : training.title} curves={curves} scaling={scaling(query)} zoom={zoom} height={280} />
    </div>
  );
}

/** Further held-out metrics, one chart per environment, and links to the answers. */
function EvaluationSection({ id, found, query }: { id: string; found: RunView; query: URLSearchParams }) {
  const names = found.metrics.filter((name) => /^eval\/.+\/pass@\d+$/.test(name)).slice(0, 24);
  const asked = useAnswer<Curves>(names.length ? address(`/runs/${id}/curves`, { metric: names, smooth: 1, points: 600, ...range(query) }) : null, id);
  const version = useAnswer<TracedSteps>(`/runs/${id}/traces`, id).answer?.evaluations.at(-1);
  if (names.length === 0 && version === undefined) return null;
  const environments = [...new Set(names.map((name) => name.split("/").slice(1, -1).join("/")))];
  return (
    <Section title="Evaluations" id="evaluations">
      {version === undefined ? null : (
        <p>
          <a href={to(`/run/${id}/rollouts`, { evaluation: version })}>Held-out answers of version {version}, worst first</a>
        </p>
      )}
      {names.length === 0 ? null : (
        <Answered asked={asked}>
          {(answer) => (
            <div class="charts">
              {environments.map((environment) => {
                const own = answer.curves.filter((one) => one.metric.startsWith(`eval/${environment}/pass@`));
                const curves = own.map((view): Curve => ({ label: view.metric.split("/").at(-1) as string, view, sparse: true }));
                return <Chart key={environment} title={`Held-out tasks solved, ${environment}`} curves={curves} scaling={scaling(query)} zoom={zoom} />;
              })}
            </div>
          )}
        </Answered>
      )}
    </Section>
  );
}

function TimesSection({ id, query }: { id: string; query: URLSearchParams }) {
  const asked = useAnswer<Timeline>(address(`/runs/${id}/timeline`, range(query)), id);
  return (
    <Section title="Waits between roles" id="times">
      <Answered asked={asked}>{(found) => <Times found={found} />}</Answered>
    </Section>
  );
}

const OF_GPUS = ["perf/mfu", "perf/peak_memory"];
const LOSSES = ["waitedForRollouts", "waitedForTrainer", "startup", "stopping"];

/** For a run on GPUs: utilization and memory of the trainer's GPUs, and the share of time without training. */
function GpuSection({ id, found, query }: { id: string; found: RunView; query: URLSearchParams }) {
  const names = OF_GPUS.filter((name) => found.metrics.includes(name));
  const asked = useAnswer<Curves>(names.length ? address(`/runs/${id}/curves`, { metric: names, smooth: smooth(query), points: 600, ...range(query) }) : null, id);
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
              {answer.curves.map((view) => (
                <Alone key={view.metric} view={view} query={query} />
              ))}
            </div>
          )}
        </Answered>
      ) : null}
      <p class="hint">For all GPUs, including the engines', with a resolution of seconds: see the dashboards in docs/monitoring.md.</p>
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
  const all = numbers(found);
  const only = found.attempts[0];
  return (
    <Section title="Attempts and failures" id="attempts">
      {found.failures.length === 0 ? <p class="note">{only && all.length === 1 ? `One attempt, steps ${number(only.firstStep)} to ${number(only.lastStep)}, without a failure.` : "No attempt has failed."}</p> : null}
      {found.failures.length === 0 && all.length <= 1 ? null : (
        <Wide label="Attempts">
          <table class="cards attempts">
            <thead>
              <tr>
                <th scope="col">Attempt</th>
                <th scope="col">Steps of the result</th>
                <th scope="col">End</th>
              </tr>
            </thead>
            <tbody>
              {all.map((attempt) => (
                <Attempt key={attempt} attempt={attempt} newest={attempt === all[0]} found={found} />
              ))}
            </tbody>
          </table>
        </Wide>
      )}
    </Section>
  );
}

function Attempt({ attempt, newest, found }: { attempt: number; newest: boolean; found: RunView }) {
  const steps = found.attempts.find((one) => one.attempt === attempt);
  const failure = found.failures.find((one) => one.attempt === attempt);
  const phase = found.run.phase;
  return (
    <tr>
      <th scope="row">Attempt {attempt}</th>
      <td>{steps ? `${number(steps.firstStep)} to ${number(steps.lastStep)}` : "none"}</td>
      <td class="reason">
        {failure ? (
          <>
            {failure.reason} ({failure.process}
            {failure.exitCode === null ? "" : `, exit code ${failure.exitCode}`}){failure.time === null ? "" : `, ${ago(failure.time)}`}
            {failure.message ? <small> {failure.message}</small> : null}
          </>
        ) : newest ? (
          phase === "Complete" ? "complete" : ["Failed", "Suspended"].includes(phase) ? "stopped" : "not ended yet"
        ) : (
          "followed by the next attempt"
        )}
      </td>
    </tr>
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
