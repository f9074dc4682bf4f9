"""Tools of a task (with state that a reward reads) and of the taskset; a `@stop` and an `@intercept`."""

import verifiers.v1 as vf
from pydantic import Field

PRICES = {"apple": 3, "pear": 4, "fig": 5}


class ShopState(vf.State):
    bought: dict[str, int] = Field(default_factory=dict)


class BasketConfig(vf.ToolsetConfig):
    pass


class Basket(vf.Toolset[BasketConfig, ShopState]):
    TOOL_PREFIX = None

    async def setup_task(self, task):
        self.fruit = task.fruit

    @vf.tool
    def buy(self, fruit: str, count: int = 1) -> str:
        """Put fruit into the basket."""
        if fruit != self.fruit:
            raise ValueError(f"no {fruit} today")
        self.state.bought[fruit] = self.state.bought.get(fruit, 0) + count
        return f"{count} {fruit}"


class PricesConfig(vf.SharedToolsetConfig):
    pass


class Prices(vf.Toolset[PricesConfig, vf.State]):
    async def setup(self):
        self.prices = dict(PRICES)

    @vf.tool
    async def of(self, fruit: str) -> int:
        """The price of a fruit."""
        return self.prices[fruit]


class ShopData(vf.TaskData):
    fruit: str


class ShopTask(vf.Task[ShopData, ShopState]):
    @classmethod
    def toolsets(cls, config):
        return [Basket(BasketConfig())]

    async def finalize(self, trace, runtime):
        await runtime.write("basket.txt", str(trace.state.bought).encode())

    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return sum(trace.state.bought.values()) >= 10

    @vf.intercept
    def mask(self, request: vf.Request) -> vf.Request:
        last = request.messages[-1]
        if isinstance(last, vf.ToolMessage) and last.content == "5":
            last.content = "five"
        return request

    @vf.reward
    async def bought(self, task: ShopData, trace: vf.Trace, runtime) -> float:
        assert (await runtime.read("basket.txt")).decode() == str(trace.state.bought)
        return float(trace.state.bought.get(task.fruit, 0) == 2)


class Shop(vf.Taskset[ShopTask, vf.TasksetConfig]):
    def load(self):
        for fruit in PRICES:
            yield ShopTask(ShopData(prompt=f"Buy 2 of {fruit}.", fruit=fruit), self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Prices(PricesConfig())]


__all__ = ["Shop"]
