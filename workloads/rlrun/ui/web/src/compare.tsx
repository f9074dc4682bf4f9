// Comparison of runs: one chart per metric, means of the last tenth, and differences of the manifests.
import type { Comparison, Curves } from "./answers";
import { address, useAnswer } from "./api";
import { Chart, type Curve } from "./chart";
import { number } from "./format";
import { Answered, Note, Section, Title, useTitle, Wide } from "./parts";
import { change, to } from "./route";
import { scaling, smooth, View } from "./view";

const USUAL = ["reward/mean", "loss", "entropy", "mismatch_kl", "off_policy/mean", "time/step"];

export function ComparePage({ runs, query }: { runs: string[]; query: URLSearchParams }) {
  const asked = useAnswer<Comparison>(runs.length >= 2 ? address("/compare", { run: runs }) : null, "*");
  useTitle(asked.answer ? `${asked.answer.labels.join(", ")} compared` : "Runs compared");
  return (
    <>
      <Title>{asked.answer ? `Compare ${asked.answer.labels.join(", ")}` : "Compare runs"}</Title>
      {runs.length < 2 ? (
        <Note>Choose at least two runs in the list of all runs.</Note>
      ) : (
        <Answered asked={asked}>
          {(found) => (
            <>
              <nav aria-label="Compared runs">
                {found.ids.map((id, at) => (
                  <a key={id} href={to(`/run/${id}`)}>
                    {found.labels[at]}
                  </a>
                ))}
              </nav>
              {found.unread.map((why) => (
                <Note key={why}>Not shown: {why}.</Note>
              ))}
              <Charts found={found} query={query} />
              <Means found={found} />
              <Differences found={found} />
            </>
          )}
        </Answered>
      )}
    </>
  );
}

function Charts({ found, query }: { found: Comparison; query: URLSearchParams }) {
  const extra = query.get("metric") ?? "";
  const wanted = [...new Set([...(extra ? [extra] : []), ...USUAL])].filter((name) => name === extra || found.metrics.includes(name));
  return (
    <Section title="Curves" id="curves">
      <View query={query} metrics={found.metrics} extra={extra} />
      {wanted.length === 0 ? <Note>No run has trained a step.</Note> : <Together ids={found.ids} labels={found.labels} wanted={wanted} query={query} />}
    </Section>
  );
}

interface TogetherProps {
  ids: string[];
  labels: string[];
  wanted: string[];
  query: URLSearchParams;
}

function Together({ ids, labels, wanted, query }: TogetherProps) {
  // The number of runs of a page never changes while it is shown, nor does the order of these hooks: eight at most.
  const asked = Array.from({ length: 8 }, (_, at) => {
    const id = ids[at];
    const words = { metric: wanted, smooth: smooth(query), first: query.get("first"), last: query.get("last"), points: 600 };
    return useAnswer<Curves>(id === undefined ? null : address(`/runs/${id}/curves`, words), id ?? null);
  });
  const shown = asked.slice(0, ids.length);
  const problem = shown[0]?.problem;
  if (problem && shown.every((one) => one.problem !== null)) return <Note kind="problem">{problem}</Note>;
  const zoom = (first: number, last: number) => change({ first: Math.max(0, first), last });
  return (
    <div class="charts">
      {wanted.map((metric) => {
        const curves = ids.map((_, at): Curve => {
          return { label: labels[at] as string, view: asked[at]?.answer?.curves.find((one) => one.metric === metric) };
        });
        const title = curves.find((one) => one.view)?.view?.title ?? metric;
        return <Chart key={metric} title={title} curves={curves} scaling={scaling(query)} zoom={zoom} />;
      })}
    </div>
  );
}

function Means({ found }: { found: Comparison }) {
  if (found.lastTenth.length === 0) return null;
  return (
    <Section title="Means of the last tenth" id="means">
      <p class="hint">Based on the {number(found.steps)} steps that all runs have.</p>
      <Wide label="Means">
        <table class="plain">
          <thead>
            <tr>
              <th scope="col">Metric</th>
              {found.labels.map((label, at) => (
                <th scope="col" class="number" key={at}>
                  {label}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {found.lastTenth.map((one) => (
              <tr key={one.metric}>
                <th scope="row">{one.metric}</th>
                {one.means.map((mean, at) => (
                  <td class="number" key={at}>
                    {number(mean)}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </Wide>
    </Section>
  );
}

function Differences({ found }: { found: Comparison }) {
  return (
    <Section title="Differences of the manifests" id="differences">
      {found.differences.length === 0 ? (
        <p class="note">The configurations are equal.</p>
      ) : (
        <Wide label="Differences">
          <table class="plain">
            <thead>
              <tr>
                <th scope="col">Field</th>
                {found.labels.map((label, at) => (
                  <th scope="col" key={at}>
                    {label}
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {found.differences.map((one) => (
                <tr key={one.field}>
                  <th scope="row">{one.field}</th>
                  {one.values.map((value, at) => (
                    <td class="reason" key={at}>
                      {value}
                    </td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </Wide>
      )}
    </Section>
  );
}
