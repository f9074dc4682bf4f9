// Kubernetes objects of a run: conditions, pods, events.
import type { RunView } from "./answers";
import { ago } from "./format";
import { Note, Section, Wide } from "./parts";

export function ClusterSections({ found }: { found: RunView }) {
  return (
    <>
      <Section title="Conditions" id="conditions">
        <Rows label="Conditions" heads={["Condition", "Status", "Reason", "Since", "Says"]} rows={found.conditions.map((one) => [one.type, one.status, one.reason, ago(one.since), one.message])} />
      </Section>
      <Section title="Pods" id="pods">
        {found.processes.length === 0 ? <Note>There are no pods now.</Note> : null}
        <Rows label="Pods" heads={["Pod", "Role", "State", "Restarts", "Node"]} rows={found.processes.map((one) => [one.name, one.role, one.ready ? `${one.state}, ready` : one.state, one.restarts, one.node ?? "–"])} />
      </Section>
      <Section title="Events" id="events">
        {found.events.length === 0 ? <Note>The cluster has no events about this run; old events are deleted.</Note> : null}
        <Rows label="Events" heads={["Event", "When", "Times", "Says"]} rows={found.events.map((one) => [one.warning ? `⚠ ${one.reason}` : one.reason, ago(one.time), one.count, one.message])} />
      </Section>
    </>
  );
}

function Rows({ label, heads, rows }: { label: string; heads: string[]; rows: (string | number)[][] }) {
  if (rows.length === 0) return null;
  return (
    <Wide label={`Table of ${label.toLowerCase()}`}>
      <table class="plain">
        <thead>
          <tr>
            {heads.map((head) => (
              <th key={head} scope="col">
                {head}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((row, at) => (
            <tr key={at}>
              <th scope="row">{row[0]}</th>
              {row.slice(1).map((cell, column) => (
                <td key={column} class={column === row.length - 2 ? "reason" : undefined}>
                  {cell}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </Wide>
  );
}
