// Rollouts of a step: filtered and sorted by the server, a page at a time.
import type { RolloutPage as Page, RolloutRow, TracedSteps } from "./answers";
import { address, useAnswer } from "./api";
import { number } from "./format";
import { Answered, Choice, Field, Note, Title, Wide } from "./parts";
import { change, to } from "./route";

const LIMIT = 50;
export const FILTERS = ["step", "evaluation", "environment", "rewardMin", "rewardMax", "tokensMin", "tokensMax", "group", "order"] as const;
const ORDERS = [["trace", "as trained"], ["worst", "worst reward first"], ["best", "best reward first"], ["longest", "longest first"], ["shortest", "shortest first"]] as const;

/** Filters of an address, with the newest step where none is named. */
export function filters(query: URLSearchParams, traced: TracedSteps | null): Record<string, string> | null {
  const found = Object.fromEntries(FILTERS.flatMap((name) => (query.get(name) ? [[name, query.get(name) as string]] : [])));
  if (found.step || found.evaluation) return found;
  const last = traced?.spans.at(-1)?.[1];
  if (last !== undefined) return { ...found, step: String(last) };
  const version = traced?.evaluations.at(-1);
  return version === undefined ? null : { ...found, evaluation: String(version) };
}

export function RolloutsPage({ id, query }: { id: string; query: URLSearchParams }) {
  const traced = useAnswer<TracedSteps>(`/runs/${id}/traces`, id);
  const chosen = filters(query, traced.answer);
  const offset = Number(query.get("offset") ?? 0);
  const asked = useAnswer<Page>(chosen === null ? null : address(`/runs/${id}/rollouts`, { ...chosen, offset, limit: LIMIT }));
  document.title = "Rollouts · RLRun";
  const put = (name: string) => (value: string) => change({ [name]: value, offset: null });
  return (
    <>
      <Title>Rollouts</Title>
      <nav aria-label="Of this run">
        <a href={to(`/run/${id}`)}>The run</a>
      </nav>
      <Answered asked={traced}>
        {(known) => {
          if (chosen === null) return <Note>No step has a trace yet; rollouts appear with the first trained step.</Note>;
          const field = (name: string, label: string) => <Field label={label} value={chosen[name] ?? ""} put={put(name)} />;
          const environments = (asked.answer?.environments ?? []).map((name) => [name, name] as const);
          return (
            <>
              <div class="tools" data-filter>
                {chosen.evaluation && !chosen.step ? null : <Field label="Step" value={chosen.step ?? ""} put={(step) => change({ step, evaluation: null, offset: null })} />}
                {known.evaluations.length ? (
                  <Choice
                    label="Held-out answers"
                    value={chosen.evaluation ?? ""}
                    options={[["", "no: of training"], ...known.evaluations.map((version) => [String(version), `of version ${version}`] as const)]}
                    put={(evaluation) => change({ evaluation, step: null, offset: null })}
                  />
                ) : null}
                <Choice label="Environment" value={chosen.environment ?? ""} options={[["", "all"], ...environments]} put={put("environment")} />
                <Choice label="Order" value={chosen.order ?? "trace"} options={ORDERS} put={(order) => change({ order: order === "trace" ? null : order, offset: null })} />
                {field("rewardMin", "Reward from")}
                {field("rewardMax", "Reward to")}
                {field("tokensMin", "Tokens from")}
                {field("tokensMax", "Tokens to")}
                {field("group", "Group")}
              </div>
              <p class="hint">Traces: {known.spans.map(([first, last]) => (first === last ? `step ${first}` : `steps ${first} to ${last}`)).slice(-6).join(", ") || "none of training"}.</p>
              <Answered asked={asked}>{(page) => <Rows id={id} page={page} chosen={chosen} offset={offset} />}</Answered>
            </>
          );
        }}
      </Answered>
    </>
  );
}

function Rows({ id, page, chosen, offset }: { id: string; page: Page; chosen: Record<string, string>; offset: number }) {
  if (page.chosen === 0) return <Note>None of {number(page.total)} rollouts fits these filters.</Note>;
  const last = Math.min(page.chosen, offset + LIMIT);
  return (
    <>
      <p role="status">
        {number(offset + 1)} to {number(last)} of {number(page.chosen)}
        {page.chosen < page.total ? ` (${number(page.total)} in the trace)` : ""}; reward {number(page.rewardMean)} on average, from {number(page.rewardMin)} to {number(page.rewardMax)}
      </p>
      <Wide label="Rollouts">
        <table>
          <thead>
            <tr>
              <th scope="col">Rollout</th>
              <th scope="col" class="number">Reward</th>
              <th scope="col" class="number less">Advantage</th>
              <th scope="col">Environment</th>
              <th scope="col" class="number">Tokens</th>
              <th scope="col" class="number less">Turns</th>
              <th scope="col" class="less">Versions</th>
              <th scope="col">Asked and answered</th>
            </tr>
          </thead>
          <tbody>
            {page.rows.map((row) => (
              <Line key={row.number} row={row} href={to(`/run/${id}/rollouts/${row.number}`, chosen)} />
            ))}
          </tbody>
        </table>
      </Wide>
      <div class="tools">
        <button type="button" data-previous disabled={offset === 0} onClick={() => change({ offset: Math.max(0, offset - LIMIT) || null })}>
          Page before
        </button>
        <button type="button" data-next disabled={last >= page.chosen} onClick={() => change({ offset: offset + LIMIT })}>
          Next page
        </button>
      </div>
    </>
  );
}

function Line({ row, href }: { row: RolloutRow; href: string }) {
  return (
    <tr>
      <th scope="row">
        <a href={href}>
          {row.group === null ? row.taskId : `group ${row.group}`}, {row.rollout ?? row.number}
        </a>
      </th>
      <td class="number">{number(row.reward)}</td>
      <td class="number less">{number(row.advantage)}</td>
      <td>{row.environment}</td>
      <td class="number">
        {number(row.completionTokens)}
        {row.truncated ? " (cut)" : ""}
      </td>
      <td class="number less">{row.turns}</td>
      <td class="less">{row.versions.join(", ") || "–"}</td>
      <td class="excerpt">
        {row.error ? <em>{row.error}</em> : null}
        <span>{row.prompt}</span>
        <span>{row.answer}</span>
      </td>
    </tr>
  );
}
