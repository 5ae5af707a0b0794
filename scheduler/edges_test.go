package scheduler

// edges is accounting §2 written down a second time, apart from the code.
var edges = map[[2]SlotState]bool{
	{Unknown, Ready}: true, {Unknown, Idle}: true,
	{Unknown, Loading}: true, {Idle, Loading}: true,
	{Idle, Ready}:    true,
	{Loading, Ready}: true, {Loading, Idle}: true,
	{Loading, Stopping}: true,
	{Ready, Stopping}:   true,
	{Unknown, Stopping}: true,
	{Ready, Idle}:       true,
	{Stopping, Idle}:    true,
	{Stopping, Ready}:   true, {Stopping, Unknown}: true,
}
