// Made by `python -m tools.ui_types --write` from rlrun/ui/models.

export interface Me {
  user: string | null;
  session: boolean;
}

export interface Problem {
  problem: string;
  login: boolean;
}

export interface ProgressView {
  step: number | null;
  totalSteps: number | null;
  policyVersion: number | null;
  reward: number | null;
  loss: number | null;
  tokensPerSecond: number | null;
  stalenessMean: number | null;
  lastStepTime: string | null;
  etaSeconds: number | null;
  checkpointStep: number | null;
  stepsLost: number;
}

export interface RunRow {
  id: string;
  name: string;
  where: string;
  task: string;
  phase: string;
  reason: string | null;
  message: string | null;
  attempt: number;
  restarts: number;
  progress: ProgressView;
  started: string | null;
  ended: string | null;
}

export interface Refused {
  id: string;
  why: string;
}

export interface RunList {
  nothing: string;
  runs: RunRow[];
  refused: Refused[];
}

export interface FindingView {
  what: string;
  evidence: string;
  do: string;
  since: string | null;
  kind: string;
}

export interface Why {
  headline: string;
  now: FindingView[];
  before: FindingView[];
  besides: string[];
  steps: string[];
}

export interface FailureView {
  attempt: number;
  role: string;
  process: string;
  exitCode: number | null;
  reason: string;
  message: string;
  time: string | null;
}

export interface AttemptView {
  attempt: number;
  firstStep: number;
  lastStep: number;
}

export interface UseView {
  use: string;
  seconds: number;
}

export interface CostView {
  gpus: boolean;
  hours: number;
  uses: UseView[];
}

export interface WaitView {
  text: string;
  role: string | null;
  phase: string | null;
  since: string | null;
}

export interface ConditionView {
  type: string;
  status: string;
  reason: string;
  message: string;
  since: string | null;
}

export interface EventView {
  reason: string;
  message: string;
  warning: boolean;
  time: string | null;
  count: number;
}

export interface ProcessView {
  name: string;
  role: string;
  attempt: number | null;
  state: string;
  ready: boolean;
  restarts: number;
  node: string | null;
}

export interface RunView {
  run: RunRow;
  place: "folder" | "cluster";
  files: boolean;
  unread: string[];
  conditions: ConditionView[];
  events: EventView[];
  processes: ProcessView[];
  wait: WaitView | null;
  heardSeconds: number | null;
  command: string | null;
  why: Why;
  failures: FailureView[];
  attempts: AttemptView[];
  metrics: string[];
  firstStep: number | null;
  lastStep: number | null;
  results: string[];
  cost: CostView | null;
}

export interface Change {
  field: string;
  before: string;
  after: string;
}

export interface EditView {
  attempt: number;
  firstStep: number;
  started: string | null;
  changes: Change[];
  known: boolean;
}

export interface History {
  said: string;
  edits: EditView[];
}

export interface Origin {
  id: string | null;
  run: string;
  step: number;
  attempt: number;
  folder: string;
  changes: Change[];
}

export interface ForkView {
  id: string;
  label: string;
  step: number;
  changes: Change[];
}

export interface Lineage {
  origin: Origin | null;
  forks: ForkView[];
}

export interface Mark {
  step: number;
  value: number;
}

export interface CurveView {
  metric: string;
  title: string;
  unit: string;
  steps: number[];
  values: number[];
  window: number;
  meanSteps: number[];
  means: number[];
  measured: number;
  low: number;
  high: number;
  outliers: number;
  marks: Mark[];
}

export interface Curves {
  curves: CurveView[];
}

export interface Sparkline {
  title: string;
  steps: number[];
  values: number[];
  last: number | null;
}

export interface Part {
  name: string;
  label: string;
  waits: boolean;
  seconds: number[];
}

export interface Timeline {
  first: number[];
  last: number[];
  parts: Part[];
  high: number;
}

export interface Staleness {
  step: number;
  lags: number[];
  tokens: number[];
}

export interface Manifest {
  text: string;
}

export interface Difference {
  field: string;
  values: string[];
}

export interface Mean {
  metric: string;
  means: (number | null)[];
}

export interface Comparison {
  ids: string[];
  labels: string[];
  steps: number;
  metrics: string[];
  lastTenth: Mean[];
  differences: Difference[];
  unread: string[];
}

export interface RolloutRow {
  number: number;
  group: number | null;
  rollout: number | null;
  environment: string;
  taskId: string;
  reward: number | null;
  advantage: number | null;
  tokens: number | null;
  completionTokens: number | null;
  finishReason: string | null;
  truncated: boolean;
  error: string | null;
  turns: number;
  versions: number[];
  prompt: string;
  answer: string;
}

export interface RolloutPage {
  total: number;
  chosen: number;
  offset: number;
  rows: RolloutRow[];
  environments: string[];
  rewardMean: number | null;
  rewardMin: number | null;
  rewardMax: number | null;
}

export interface TracedSteps {
  run: string;
  spans: [number, number][];
  evaluations: number[];
}

export interface CallView {
  name: string;
  arguments: string;
}

export interface TurnView {
  role: string;
  text: string;
  calls: CallView[];
}

export interface Measured {
  metric: string;
  value: number | null;
}

export interface RolloutView {
  run: string;
  row: RolloutRow;
  turns: TurnView[];
  tools: string[];
  measures: Measured[];
  seconds: number | null;
  dispatchVersion: number | null;
}

export interface TokenSequence {
  texts: string[];
  sampled: boolean[];
  logprobs: number[];
  advantages: number[];
  versions: number[];
  cut: number;
}

export interface Tokens {
  sequences: TokenSequence[];
  decoded: boolean;
  why: string | null;
}

export interface NextCommand {
  about: string;
  command: string;
}

export interface Reasons {
  samples: string[][];
  fetch: string | null;
  commands: NextCommand[];
  why: string | null;
}

export interface Piece {
  side: "both" | "first" | "second";
  text: string;
}

export interface DiffView {
  first: RolloutRow;
  second: RolloutRow;
  turns: Piece[][];
  roles: string[];
}
